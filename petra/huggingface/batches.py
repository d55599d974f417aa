"""Batches of a data loader of ``transformers`` as microbatches of one shape."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate import skip_first_batches
from torch import Tensor
from torch.nn import functional as F

from petra.errors import DataError, require
from petra.huggingface.inputs import FIELDS, stack
from petra.reversible import derive_seed, seeded
from petra.specs import IGNORED

Pair = tuple[Tensor, Tensor]
"""Inputs and targets of a microbatch."""


@dataclass(frozen=True)
class Form:
    """Form of microbatches.

    Attributes:
        rows: Number of rows.
        fields: Names of the rows of the inputs; empty for images.
        size: Number of tokens of a row; shorter ones are padded. None for images.
        labels: Name of the labels.
        shifts: Whether the target of a token is the label of the next one.
    """

    rows: int
    fields: Sequence[str]
    size: int | None
    labels: str
    shifts: bool

    def split(self, batch: Mapping[str, Tensor]) -> list[Pair]:
        """Return the microbatches of a batch. The last one is filled with rows whose targets don't count.

        Raises:
            DataError: If the batch lacks labels or inputs, or has entries of other names, or rows that are too long.
        """
        names = sorted(batch) if isinstance(batch, Mapping) else [type(batch).__name__]
        fits = {self.labels} < {*names} <= {*FIELDS, "pixel_values", self.labels}
        require(fits, "batch", f"{', '.join(FIELDS)} or pixel_values, and {self.labels}", ", ".join(names), DataError)
        labels, length = batch[self.labels], 0 if self.size is None else batch[FIELDS[0]].shape[1]
        require(length <= (self.size or 0), "max_length", f"at least {length}, the tokens of a row", self.size, DataError)
        inputs = stack(batch, self.fields, self.size) if self.size else batch["pixel_values"]
        if labels.dim() == 2:
            labels = F.pad(labels[:, self.shifts :], (0, (self.size or length) - length + self.shifts), value=IGNORED)
        found = []
        for start in range(0, len(inputs), self.rows):
            rows = torch.arange(start, start + self.rows)
            chosen = rows.clamp(max=len(inputs) - 1)
            targets = labels[chosen]
            targets[rows > chosen] = IGNORED
            found.append((inputs[chosen], targets.flatten()))
        return found


class TrainBatches:
    """Data source of training: the batches of a loader, epoch after epoch. They are read once each, in their order.

    If ``k`` does not divide the number of batches of an epoch, its last update has fewer, as in ``transformers``, and the rest of
    its microbatches have no targets.

    Args:
        loader: Data loader with a method ``set_epoch``.
        form: Form of a microbatch.
        k: Microbatches per update.
        seed: Seed of random numbers that the collator draws.
        weights: Where to append the weights of the losses of microbatches whose targets are read.
        by_targets: Whether the loss of an update is the mean over its targets, instead of that over its microbatches.
        reads: Whether this process reads inputs, and targets.
        updates: Number of updates done before.
    """

    def __init__(
        self,
        loader: Any,
        form: Form,
        k: int,
        seed: int,
        *,
        weights: deque[float],
        by_targets: bool,
        reads: tuple[bool, bool],
        updates: int = 0,
    ) -> None:
        self._loader, self._form, self._k, self._seed = loader, form, k, seed
        self._weights, self._by_targets, self._reads = weights, by_targets, reads
        self._inputs, self._targets = deque[Tensor](), deque[Tensor]()
        self.updates_per_epoch = math.ceil(len(loader) / k)
        self._next_update = self._updates(updates)

    def inputs(self, m: int) -> Tensor:
        """Return the inputs of the next microbatch."""
        return self._next(self._inputs)

    def targets(self, m: int) -> Tensor:
        """Return the targets of the next microbatch."""
        return self._next(self._targets)

    def _next(self, queue: deque[Tensor]) -> Tensor:
        if not queue:
            pairs = next(self._next_update)
            counts = [int((targets != IGNORED).sum()) for _, targets in pairs]
            real = sum(count > 0 for count in counts)
            weights = [self._k * (count / max(1, sum(counts)) if self._by_targets else 1 / max(1, real)) for count in counts]
            if self._reads[0]:
                self._inputs += [inputs for inputs, _ in pairs]
            if self._reads[1]:
                self._targets += [targets for _, targets in pairs]
                self._weights += weights
        return queue.popleft()

    def _updates(self, done: int) -> Iterator[list[Pair]]:
        """Yield the k microbatches of each update."""
        epoch, skip = divmod(done, self.updates_per_epoch)
        while True:
            self._loader.set_epoch(epoch)
            batches = iter(skip_first_batches(self._loader, skip * self._k) if skip else self._loader)
            for update in range(skip, self.updates_per_epoch):
                with seeded(derive_seed(self._seed, epoch * self.updates_per_epoch + update)):
                    pairs = [pair for batch in islice(batches, self._k) for pair in self._form.split(batch)]
                inputs, targets = pairs[-1]
                yield pairs + [(inputs, torch.full_like(targets, IGNORED))] * (self._k - len(pairs))
            epoch, skip = epoch + 1, 0
