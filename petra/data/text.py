"""Any file as text: its bytes are the tokens, and each is predicted from those before it in its window."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from petra.data.dataset import Dataset, Split
from petra.data.files import folder_of, read
from petra.errors import ConfigError, DataError
from petra.specs import IGNORED

HELP = "set data.root=<a file of text>"


def text(root: str | Path | None = None, size: int = 256, validation: float = 0.1) -> Dataset:
    """The file ``root`` in windows of ``size`` bytes; its last part, a share of ``validation``, is for testing.

    For training, windows lie side by side and each begins up to ``size`` - 1 tokens later at random if augmented. For testing they
    cover every token but the first once; in the last one, targets past the end are -100.

    Raises:
        ConfigError: a setting out of range.
        DataError: a file that is missing or too short.
    """
    if size < 1:
        raise ConfigError(f"data.size: found {size}, accepted are whole numbers from 1 on")
    if not 0 < validation < 1:
        raise ConfigError(f"data.validation: found {validation}, accepted are numbers between 0 and 1")
    path = folder_of(root, "text", HELP)
    content = read(path, HELP)
    tokens = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
    train, test = tokens.tensor_split([round(len(tokens) * (1 - validation))])
    if len(train) <= size or len(test) < 2:
        raise DataError(
            f"{path}: found {len(tokens)} bytes, {len(train)} to train and {len(test)} to test on, "
            f"accepted are {size + 1} or more and 2 or more"
        )
    windows = (len(train) - 1) // size, -(-(len(test) - 1) // size)
    splits = (Split(n, Windows(part, size, 0), Windows(part, size, 1)) for n, part in zip(windows, (train, test), strict=True))
    return Dataset("text", 256, size, *splits)


@dataclass(frozen=True, eq=False)
class Windows:
    """Reader of inputs int64 (B, T) at ``ahead`` = 0, and of targets int64 (B·T,), the next tokens, at 1."""

    tokens: Tensor
    size: int
    ahead: int

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        starts, last = indices * self.size, len(self.tokens) - 1
        if seed is not None:
            later = torch.randint(self.size, (len(indices),), generator=torch.Generator().manual_seed(seed))
            starts = (starts + later).clamp(max=last - self.size)
        places = starts[:, None] + torch.arange(self.size) + self.ahead
        found = self.tokens[places.clamp(max=last)].long()
        return found.masked_fill(places > last, IGNORED).flatten() if self.ahead else found
