"""Data sources. The first stage reads inputs and the last stage reads targets by microbatch number, so no targets are sent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from math import inf
from numbers import Integral, Real
from typing import TypeVar

import torch
from torch import Tensor

from petra.data.dataset import Dataset, Split
from petra.data.prefetch import TIMEOUT, Prefetcher
from petra.errors import DataError, invalid, is_integer, require
from petra.reversible import derive_seed
from petra.specs import IGNORED

_ORDER, _AUGMENTATION = 1, 2
Read = TypeVar("Read")
Request = Callable[[int], tuple[Tensor, int | None]]
"""Function of a microbatch that returns the indices of its samples, and the seed of its augmentation."""
RECENT = 256
"""Number of microbatches whose targets are kept if they are read with the inputs. More than are in flight at a time."""
RECENT_DECODED = 4
"""Number of microbatches whose targets are kept otherwise: targets for pixels are large, and a diagnosis reads some twice."""


class _Source:
    """Reader of the microbatches of a split, which prepares them in worker processes if there are any.

    Args:
        split: The samples.
        request: Samples of a microbatch.
        workers, share, timeout: As for :class:`TrainSource`.
        stop: Number of the microbatch after the last one, or None for an endless sequence.
    """

    def __init__(self, split: Split, request: Request, workers: int, share: slice, timeout: float, stop: int | None = None) -> None:
        require(isinstance(workers, Integral) and 0 <= workers <= 1000, "data.workers", "an integer from 0 to 1000", workers)
        require(isinstance(share, slice), "share", "a slice", share)
        require(isinstance(timeout, Real) and timeout > 0, "timeout", "a number > 0", timeout)

        # These functions do not refer to the source, see Prefetcher.
        def inputs(m: int) -> tuple[Tensor, Tensor | None]:
            indices, seed = request(m)
            require(len(indices[share]) > 0, "share", f"some of {len(indices)} rows", share, DataError)
            if split.samples is not None:
                found, targets = split.samples(indices, seed)
                return found[share], targets
            assert split.inputs is not None, "this process reads no inputs"
            if seed is None or split.epoch_seed:
                return split.inputs(indices[share], seed), None
            return split.inputs(indices, seed)[share], None

        def targets(m: int) -> Tensor:
            assert split.targets is not None, "this process reads no targets"
            return split.targets(*request(m))

        def ahead(read: Callable[[int], Read], workers: int = workers) -> Callable[[int], Read]:
            return Prefetcher(read, workers, stop, timeout) if workers else read

        self._read, self._read_again = ahead(inputs), ahead(inputs)
        self._read_targets = ahead(targets, workers if split.decodes_targets else 0)
        self._stop = inf if stop is None else stop
        self._recent: OrderedDict[int, Tensor] = OrderedDict()
        self._most = RECENT_DECODED if split.samples is None else RECENT

    def inputs(self, m: int) -> Tensor:
        """Return the inputs of microbatch ``m``: float32 images (B, 3, H, W), or int64 tokens (B, T)."""
        inputs, targets = self._read(self._checked(m))
        if targets is not None:
            self._keep(m, targets)
        return inputs

    def refetch(self, m: int) -> Tensor:
        """Return the inputs of microbatch ``m`` again, equal bit for bit, with the same augmentation.

        These inputs have workers of their own, as many as :meth:`inputs`: common workers would restart at each number that does not
        follow the last one.
        """
        return self._read_again(m)[0]

    def targets(self, m: int) -> Tensor:
        """Return the targets of microbatch ``m``: int64 (B,) for images, (B·T,) for tokens, (B, H, W) for pixels."""
        found = self._recent.get(self._checked(m))
        return self._keep(m, self._read_targets(m)) if found is None else found

    def _checked(self, m: int) -> int:
        require(is_integer(m) and 0 <= m < self._stop, "microbatch", f"an integer >= 0 and < {self._stop}", m)
        return m

    def _keep(self, m: int, targets: Tensor) -> Tensor:
        self._recent[m] = kept = targets.clone()  # not the workers' shared memory
        self._recent.move_to_end(m)
        if len(self._recent) > self._most:
            self._recent.popitem(last=False)
        return kept


class TrainSource(_Source):
    """Source of training data: an endless sequence of microbatches m = 0, 1, 2, ... with random access.

    Microbatch m belongs to epoch m // batches_per_epoch. Each epoch has its own random order of samples. Samples that don't fill
    the last microbatch of an epoch are left out of that epoch. Order and augmentation depend on the seed and m only.

    Args:
        dataset: Data set whose training split is read, or a split.
        batch_size: Samples per microbatch.
        seed: Seed of order and augmentation.
        augment: Whether to augment inputs.
        workers: Number of worker processes that prepare microbatches in advance. 0 prepares them on request in this process.
        share: Rows of each microbatch that :meth:`inputs` returns, for one of several replicas. :meth:`targets` returns all rows.
        timeout: Seconds to wait for a microbatch from a worker process.

    Attributes:
        batches_per_epoch: Number of microbatches per epoch.
        preparation: How the data set prepares test images, or None.
        vocabulary, delimiter, contents: As of :class:`petra.data.Dataset`. If the contents are unknown, the number of samples.

    Raises:
        ConfigError: If ``batch_size`` is less than 1 or exceeds the training set, or another argument is not accepted.
    """

    def __init__(
        self,
        dataset: Dataset | Split,
        batch_size: int,
        seed: int,
        augment: bool = True,
        workers: int = 0,
        share: slice = slice(None),
        timeout: float = TIMEOUT,
    ) -> None:
        split = _split(dataset, "train")
        expected = f"an integer from 1 to {split.count}, the number of training samples of {getattr(dataset, 'name', 'the split')}"
        require(isinstance(batch_size, Integral) and 1 <= batch_size <= split.count, "data.batch_size", expected, batch_size)
        require(is_integer(seed) and 0 <= seed < 2**63, "seed", "an integer >= 0 and < 2^63", seed)
        require(isinstance(augment, bool), "augment", "true or false", augment)
        batches = self.batches_per_epoch = split.count // batch_size
        names = "preparation", "vocabulary", "delimiter"
        self.preparation, self.vocabulary, self.delimiter = (getattr(dataset, name, None) for name in names)
        self.contents = getattr(dataset, "contents", None) or f"{split.count} samples"

        @lru_cache(maxsize=2)  # the first stage may read the next epoch while the last stage still reads the current one
        def order(epoch: int) -> Tensor:
            generator = torch.Generator().manual_seed(derive_seed(seed, _ORDER, epoch))
            found = torch.randperm(split.count, generator=generator) if split.order is None else split.order(generator)
            require(len(found) == split.count, "order", f"{split.count} indices, as the split has samples", len(found))
            return found

        def request(m: int) -> tuple[Tensor, int | None]:
            epoch, position = divmod(m, batches)
            indices = order(epoch)[position * batch_size : (position + 1) * batch_size]
            return indices, derive_seed(seed, _AUGMENTATION, epoch if split.epoch_seed else m) if augment else None

        super().__init__(split, request, workers, share, timeout)


class EvalSource(_Source):
    """Source of test data: the test samples in their order. The last microbatch is padded to ``batch_size`` with copies of the last
    sample. An evaluation leaves them out (:meth:`real_rows`).

    Args:
        dataset: Data set whose test split is read, or a split.
        batch_size: Samples per microbatch.
        workers, share, timeout: As for :class:`TrainSource`.

    Attributes:
        batches, batch_size: Number of microbatches, and of the rows of each.
        bytes_per_target: As :attr:`petra.data.Dataset.bytes_per_target`.
        unit: What a target is counted as in records: ``images``, ``tokens`` or ``pixels``.

    Raises:
        ConfigError: If ``batch_size`` is not an integer >= 1, or if another argument is not accepted.
    """

    def __init__(
        self, dataset: Dataset | Split, batch_size: int, workers: int = 0, share: slice = slice(None), timeout: float = TIMEOUT
    ) -> None:
        require(isinstance(batch_size, Integral) and batch_size >= 1, "data.batch_size", "an integer >= 1", batch_size)
        split = _split(dataset, "test")
        self.batches = -(-split.count // batch_size)
        self.bytes_per_target: float | None = getattr(dataset, "bytes_per_target", None)
        self.unit = "images"
        self.batch_size, self._padding, self._marks = batch_size, self.batches * batch_size - split.count, split.integer_targets
        rows = torch.arange(self.batches * batch_size).clamp(max=split.count - 1).view(self.batches, batch_size)
        super().__init__(split, lambda m: (rows[m], None), workers, share, timeout, self.batches)

    def real_rows(self, m: int) -> int:
        """Return the number of samples of microbatch ``m``. Its other rows are padding."""
        return self.batch_size - (self._padding if m == self.batches - 1 else 0)

    def targets(self, m: int) -> Tensor:
        """Return the targets of microbatch ``m``: (B,), (B·T,) or (B, H, W). Padding rows have -100 if targets are integers."""
        targets = super().targets(m)
        if self.real_rows(m) == self.batch_size or not self._marks:
            return targets
        masked = targets.reshape(self.batch_size, -1).clone()
        masked[-self._padding :] = IGNORED
        return masked.view_as(targets)


def _split(dataset: object, part: str) -> Split:
    """Return a split itself, or the part of a data set.

    Raises:
        ConfigError: If it is neither.
    """
    split = getattr(dataset, part) if isinstance(dataset, Dataset) else dataset
    if not isinstance(split, Split):
        raise invalid("dataset", "a Dataset or Split (petra.data.from_dataset makes one)", type(dataset).__name__)
    return split
