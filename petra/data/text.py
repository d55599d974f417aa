"""Text: the bytes of a file are tokens, and each is predicted from the tokens before it in its window."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from petra.data.dataset import Dataset, Split
from petra.data.files import folder_of, read
from petra.errors import DataError, invalid, require
from petra.specs import IGNORED

HELP = "set data.root to a text file"


def text(root: str | Path | None = None, size: int = 256, validation: float = 0.1) -> Dataset:
    """Return a file in windows of ``size`` bytes. The first part of the file is for training and the last part for testing.

    Training windows are adjacent. Augmentation moves the start of each window by a random number of tokens, up to ``size`` - 1.
    Test windows predict every token except the first once. Targets past the end of the last window are -100.

    Args:
        root: Path of the file.
        size: Tokens of a window.
        validation: Fraction of the file for testing.

    Raises:
        ConfigError: If a setting is out of range.
        DataError: If the file is missing or too short.
    """
    require(size >= 1, "data.size", "an integer >= 1", size)
    require(0 < validation < 1, "data.validation", "a number > 0 and < 1", validation)
    path = folder_of(root, "text", HELP)
    content = read(path, HELP)
    tokens = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
    train, test = tokens.tensor_split([round(len(tokens) * (1 - validation))])
    if len(train) <= size or len(test) < 2:
        expected = f"at least {size + 1} bytes for training and 2 for testing"
        raise invalid(str(path), expected, f"{len(train)} and {len(test)}", DataError)
    windows = (len(train) - 1) // size, -(-(len(test) - 1) // size)
    first, second = (
        Split(n, Windows(part, size, 0), Windows(part, size, 1)) for n, part in zip(windows, (train, test), strict=True)
    )
    return Dataset("text", 256, size, first, second)


@dataclass(frozen=True, eq=False)
class Windows:
    """Reader of windows of tokens.

    Attributes:
        tokens: All tokens, uint8 (N,).
        size: Tokens T of a window.
        offset: 0 for inputs, 1 for targets, which are the next tokens.
    """

    tokens: Tensor
    size: int
    offset: int

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        """Return int64 inputs (B, T) or int64 targets (B·T,)."""
        starts, last = indices * self.size, len(self.tokens) - 1
        if seed is not None:
            shifts = torch.randint(self.size, (len(indices),), generator=torch.Generator().manual_seed(seed))
            starts = (starts + shifts).clamp(max=last - self.size)
        positions = starts[:, None] + torch.arange(self.size) + self.offset
        tokens = self.tokens[positions.clamp(max=last)].long()
        return tokens.masked_fill(positions > last, IGNORED).flatten() if self.offset else tokens
