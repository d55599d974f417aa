"""What every data set is to the streams: two lots of samples, each with a reader of inputs and a reader of targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

Reader = Callable[[Tensor, int | None], Tensor]
"""(indices (B,), seed) → what these samples are; a seed asks for augmentation, drawn from it alone, and None for none."""


@dataclass(frozen=True, eq=False)
class Split:
    """``count`` samples. A process whose stages need no inputs, or no targets, has no reader for them."""

    count: int
    inputs: Reader | None = None
    """Images float32 (B, 3, H, W), normalised; or tokens int64 (B, T)."""
    targets: Reader | None = None
    """Classes int64 (B,), or (B·T,) for tokens; -100 where there is nothing to predict."""
    apart: bool = False
    """Whether what a seed draws for a sample is the same whichever others are asked for with it."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification data set: images with a class each, or windows of tokens with the next token at each place."""

    name: str
    classes: int
    size: int
    """Pixels of an image's side, or tokens of a window."""
    train: Split
    test: Split

    def part(self, *, inputs: bool = False, targets: bool = False) -> Dataset:
        """What a process needs whose stages read only the inputs, only the targets, or neither."""
        train, test = (
            replace(split, inputs=split.inputs if inputs else None, targets=split.targets if targets else None)
            for split in (self.train, self.test)
        )
        return replace(self, train=train, test=test)


@dataclass(frozen=True, eq=False)
class Labels:
    """Reader of targets for images: any integers (N,)."""

    labels: Tensor

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        return self.labels[indices].long()
