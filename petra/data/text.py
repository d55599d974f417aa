"""Text: the bytes of a file are tokens, and each is predicted from the tokens before it in its window."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from petra.data.dataset import Dataset
from petra.data.files import folder_of, read
from petra.data.windows import windows_of
from petra.errors import DataError, invalid, require

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
    tokens = np.frombuffer(content, np.uint8)
    train, test = np.split(tokens, [round(len(tokens) * (1 - validation))])
    if len(train) <= size or len(test) < 2:
        expected = f"at least {size + 1} bytes for training and 2 for testing"
        raise invalid(str(path), expected, f"{len(train)} and {len(test)}", DataError)
    return windows_of("text", 256, size, [train], [test], bytes_per_target=1.0)
