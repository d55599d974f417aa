"""Files of tokens, larger than memory: those of ``petra tokenize``, of llm.c and of nanoGPT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petra.data.dataset import Dataset
from petra.data.files import folder_of
from petra.data.windows import windows_of
from petra.errors import DataError, first_line, invalid, require

HELP = "write token files with petra tokenize, and set data.root to their folder"
CORPUS = "corpus.json"
"""File beside the token files with facts of the corpus."""
HEADER_BYTES = 1024
"""Size of the header of llm.c's files: 256 integers of 32 bits, which begin with a magic number, a version and a count."""
FORMATS: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""Version and type of the tokens by the magic number of llm.c's headers."""


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Tokens of one file, mapped into memory when they are first read. Only the path is sent to other processes.

    Attributes:
        path: The file.
        dtype: Type of the tokens: uint16 or uint32.
        start: Position of the first token in bytes.
        count: Number of tokens.
        classes: Number of different tokens.
    """

    path: Path
    dtype: np.dtype[Any]
    start: int
    count: int
    classes: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Return the tokens at the positions.

        Raises:
            DataError: If the file can't be read, or contains a token that is not less than ``classes``.
        """
        tokens: NDArray[Any] = self._map[positions]
        if tokens.size and int(tokens.max()) >= self.classes:
            raise invalid(str(self.path), f"tokens less than {self.classes} (data.classes)", int(tokens.max()), DataError)
        return tokens

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_map"}

    @cached_property
    def _map(self) -> NDArray[Any]:
        try:
            return np.memmap(self.path, self.dtype, "r", self.start, (self.count,))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path}: can't be read ({first_line(error)}); every machine that runs a first or a last stage needs it"
            ) from error


def open_tokens(path: Path, classes: int) -> TokenFile:
    """Open a file of tokens: with llm.c's header, or uint16 without a header (nanoGPT).

    Raises:
        DataError: If the file can't be read, or its size does not agree with its header.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            magic, version, count = np.frombuffer(file.read(12).ljust(12, b"\0"), "<i4").tolist()
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror}); {HELP}") from error
    if magic not in FORMATS or size < HEADER_BYTES:
        require(size % 2 == 0, str(path), "a whole number of uint16 tokens", f"{size} bytes", DataError)
        return TokenFile(path, np.dtype("<u2"), 0, size // 2, classes)
    expected, dtype = FORMATS[magic]
    require(version == expected, str(path), f"version {expected} of llm.c's format", version, DataError)
    found = (size - HEADER_BYTES) // dtype.itemsize
    require(found == count, str(path), f"{count} tokens, as its header says", found, DataError)
    return TokenFile(path, dtype, HEADER_BYTES, count, classes)


def tokens(root: str | Path | None = None, size: int = 256, classes: int = 256) -> Dataset:
    """Return files of tokens in windows of ``size`` tokens.

    Files named ``*train*.bin`` are for training, files named ``*val*.bin`` for testing, in the order of their names. Windows are
    adjacent within a file. Augmentation and test windows are those of :func:`petra.data.text.text`.

    Args:
        root: Folder of the files.
        size: Tokens of a window.
        classes: Number of different tokens.

    Raises:
        ConfigError: If ``size`` is out of range, or the vocabulary has another number of tokens.
        DataError: If files are missing, damaged or too short.
    """
    require(size >= 1, "data.size", "an integer >= 1", size)
    folder = folder_of(root, "tokens", HELP)
    corpus = _corpus(folder)
    if corpus:
        require(classes == corpus["classes"], "data.classes", f"{corpus['classes']}, the tokens of {folder / CORPUS}", classes)
    paths = [sorted(folder.glob(f"*{part}*.bin")) for part in ("train", "val")]
    for path in paths[0]:
        require(path not in paths[1], str(path), 'a name with "train" or "val", not with both', path.name, DataError)
    train, test = ([open_tokens(path, classes) for path in found] for found in paths)
    _require_long(folder, "*train*.bin", train, size + 1)
    _require_long(folder, "*val*.bin", test, 2)
    return windows_of("tokens", classes, size, train, test, corpus.get("bytes_per_target"))


def _corpus(folder: Path) -> dict[str, Any]:
    """Return the facts of the corpus; empty for files of other programs."""
    path = folder / CORPUS
    if not path.exists():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return {"classes": int(facts["classes"]), "bytes_per_target": float(facts["val"]["bytes"]) / max(facts["val"]["tokens"], 1)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: can't be read ({first_line(error)}); {HELP}") from error


def _require_long(folder: Path, pattern: str, files: Sequence[TokenFile], least: int) -> None:
    longest = max((len(file) for file in files), default=0)
    require(longest >= least, str(folder / pattern), f"files with at least {least} tokens", longest or "none", DataError)
