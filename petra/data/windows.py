"""Windows of tokens: each window is a sample, and each of its tokens is predicted from those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petra.data.dataset import Dataset, Split
from petra.reversible import derive_seed
from petra.specs import IGNORED


class Tokens(Protocol):
    """A sequence of tokens, in memory or in a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[Any]: ...


@dataclass(frozen=True, eq=False)
class Windows:
    """Reader of windows of one or several sequences. No window crosses the end of a sequence.

    Attributes:
        sequences: The sequences.
        size: Tokens T of a window.
        offset: 0 for inputs, 1 for targets, which are the next tokens.
        whole: Whether to leave out the last tokens of a sequence if they don't fill a window (training). Otherwise, targets past
            the end are -100 (testing).
    """

    sequences: Sequence[Tokens]
    size: int
    offset: int
    whole: bool

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Number of windows up to the end of each sequence."""
        return np.cumsum([self._count(len(tokens)) for tokens in self.sequences])

    @property
    def count(self) -> int:
        """Number of windows."""
        return int(self.ends[-1])

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        """Return int64 inputs (B, T) or int64 targets (B·T,).

        With a seed, each window starts up to T − 1 tokens later, by a number that depends on the seed and the window only.
        """
        windows = indices.numpy()
        owners = np.searchsorted(self.ends, windows, side="right")
        rows = []
        for owner, window in zip(owners.tolist(), windows.tolist(), strict=True):
            shift = 0 if seed is None else derive_seed(seed, window) % self.size
            rows.append(self._row(owner, window, shift))
        tokens = torch.from_numpy(np.stack(rows))
        return tokens.flatten() if self.offset else tokens

    def _count(self, tokens: int) -> int:
        predicted = max(tokens - 1, 0)
        return predicted // self.size if self.whole else -(-predicted // self.size)

    def _row(self, owner: int, window: int, shift: int) -> NDArray[np.int64]:
        tokens = self.sequences[owner]
        last = len(tokens) - 1
        start = (window - (int(self.ends[owner - 1]) if owner else 0)) * self.size
        if shift:
            start = min(start + shift, last - self.size)
        positions = np.arange(start + self.offset, start + self.offset + self.size)
        row: NDArray[np.int64] = tokens[positions.clip(max=last)].astype(np.int64)
        if self.offset:
            row[positions > last] = IGNORED
        return row


def windows_of(
    name: str,
    classes: int,
    size: int,
    train: Sequence[Tokens],
    test: Sequence[Tokens],
    bytes_per_target: float | None,
    vocabulary: str | None = None,
) -> Dataset:
    """Return sequences of tokens as a data set of windows.

    Args:
        name: Name of the data set.
        classes: Number of different tokens.
        size: Tokens of a window.
        train: Sequences for training.
        test: Sequences for testing.
        bytes_per_target: Mean number of bytes of text per token of the test sequences, or None if it is unknown.
        vocabulary: Fingerprint of the vocabulary, or None if it is unknown.
    """

    def split(sequences: Sequence[Tokens], whole: bool) -> Split:
        inputs, targets = (Windows(sequences, size, offset, whole) for offset in (0, 1))
        return Split(inputs.count, inputs, targets, epoch_seed=True, in_memory=True)

    return Dataset(name, classes, size, split(train, True), split(test, False), bytes_per_target, vocabulary)
