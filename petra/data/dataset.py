"""The interface of data sets: a training and a test split, each with a reader of inputs and a reader of targets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from torch import Generator, Tensor

from petra.data.preparation import Preparation

log = logging.getLogger(__name__)
Reader = Callable[[Tensor, int | None], Tensor]
"""Map from sample indices (B,) and a seed to a tensor of the samples. The seed determines the augmentation; None disables it. It is
the seed of an epoch or of a microbatch, see :attr:`Split.epoch_seed`."""
Part = Annotated[str, "same results"]
"""Name of a part of a data set for evaluation. A resumed run may change it."""


@dataclass(frozen=True, eq=False)
class Split:
    """Samples for training or for testing.

    Attributes:
        count: Number of samples.
        inputs: Reader of normalised float32 images (B, 3, H, W), or of int64 tokens (B, T). None in a process whose stages don't
            need inputs.
        targets: Reader of int64 classes, (B,) for images, (B·T,) for tokens or (B, H, W) for pixels, -100 where there is nothing to
            predict. None in a process whose stages don't need targets.
        epoch_seed: Whether readers get the same seed for all microbatches of an epoch, because they derive random numbers from it
            and the index of a sample (:func:`petra.reversible.derive_seed`). The augmentation then does not depend on the batch
            size or on the samples that are read with it. Otherwise each microbatch has a seed of its own.
        samples: Reader of inputs and targets together, for data in which one can't be read without the other.
        integer_targets: Whether targets are integers, so that targets of padding rows can be ignored.
        decodes_targets: Whether reading targets takes long, so that worker processes read them in advance.
        order: Function that draws the indices of an epoch (N,), which the readers may interpret. None: a random permutation.
        in_memory: Whether the samples are in memory, or in files mapped into memory. Inputs can then be read twice at little cost.
    """

    count: int
    inputs: Reader | None = None
    targets: Reader | None = None
    epoch_seed: bool = False
    samples: Callable[[Tensor, int | None], tuple[Tensor, Tensor]] | None = None
    integer_targets: bool = True
    decodes_targets: bool = False
    order: Callable[[Generator], Tensor] | None = None
    in_memory: bool = False

    def part(self, *, inputs: bool, targets: bool) -> Split:
        """Return the split with the selected readers only. The reader of both stays for either."""
        return replace(
            self,
            inputs=self.inputs if inputs else None,
            targets=self.targets if targets else None,
            samples=self.samples if inputs or targets else None,
            order=self.order if inputs or targets else None,
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification data set: images with their classes or a class for each pixel, or windows of tokens with the next tokens.

    Attributes:
        name: Name of the data set.
        classes: Number of classes, or of different tokens.
        size: Side of an image in pixels (its width, if the height differs), or number of tokens of a window.
        train: Training samples.
        test: Test samples.
        bytes_per_target: Mean number of bytes of text per token of the test samples. None for images, and for unknown vocabularies.
        vocabulary: Fingerprint of the vocabulary of the tokens, or of the names of classes. None if they are unknown.
        preparation: How test images are prepared, which predictions for other images repeat. None for text.
        delimiter: Token with which every document begins. None if it is unknown.
        contents: Fingerprint of the first file of the training data. None if it is unknown.
    """

    name: str
    classes: int
    size: int
    train: Split
    test: Split
    bytes_per_target: float | None = None
    vocabulary: str | None = None
    preparation: Preparation | None = None
    delimiter: int | None = None
    contents: str | None = None

    def __post_init__(self) -> None:
        if self.train is self.test:
            log.warning("data: %s is tested on its training samples", self.name)

    def part(self, *, inputs: bool = False, targets: bool = False) -> Dataset:
        """Return the data set with the selected readers only.

        Args:
            inputs: Whether to keep the readers of inputs.
            targets: Whether to keep the readers of targets.
        """
        train, test = (split.part(inputs=inputs, targets=targets) for split in (self.train, self.test))
        return replace(self, train=train, test=test)


def labels_of(labels: Tensor, indices: Tensor, seed: int | None) -> Tensor:
    """Return the labels of samples as int64 (B,). With the integer labels of all samples (N,), it is a reader of targets."""
    return labels[indices].long()
