"""Text as windows of tokens: the bytes of a file, or files of tokens, larger than memory, from ``petra tokenize`` or llm.c.

Each window is a sample, and each of its tokens is predicted from those before it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petra.data.dataset import Dataset, Part, Split
from petra.data.files import folder_of, json_form, read, reading, require_distinct, require_text, sampled_hash
from petra.errors import DataError, Positive, alternatives, invalid, require
from petra.reversible import derive_seed
from petra.specs import IGNORED

log = logging.getLogger(__name__)

TEXT_HELP = "set data.root to a text file"
HELP = "write token files with petra tokenize, and set data.root to their folder"
CORPUS = "corpus.json"
"""File beside the token files with facts of the corpus."""
PARTS = ("train", "val", "test")
"""Parts of a corpus, which are in the names of its files. Choices are made on val, results are reported on test."""
HEADER_BYTES = 1024
"""Size of the header of llm.c's files: 256 integers of 32 bits, which begin with a magic number, a version and a count."""
FORMATS: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""Version and type of the tokens by the magic number of llm.c's headers."""
LONGEST_RUN = 1024
"""Number of tokens with equal low bytes at the end of a file that is refused: its download was interrupted, or it is big-endian."""


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Tokens of one file with llm.c's header, mapped into memory when first read. Only the path is sent to other processes.

    Attributes:
        path: The file.
        dtype: Type of the tokens: uint16 or uint32.
        count: Number of tokens.
        classes: Number of different tokens.
        contents: The :func:`sampled_hash` that the file must have on each machine, or nothing.
    """

    path: Path
    dtype: np.dtype[Any]
    count: int
    classes: int
    contents: str = ""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Return the tokens at the positions.

        Raises:
            DataError: If the file can't be read, or contains a token that is not less than ``classes``.
        """
        tokens: NDArray[Any] = self._map[positions]
        self._check(tokens)
        return tokens

    def check(self) -> None:
        """Read all tokens. Raises the errors of reading some."""
        self._check(self._map)

    def _check(self, tokens: NDArray[Any]) -> None:
        if tokens.size and int(tokens.max()) >= self.classes:
            raise invalid(str(self.path), f"tokens less than {self.classes} (data.classes)", int(tokens.max()), DataError)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_map"}

    @cached_property
    def _map(self) -> NDArray[Any]:
        with reading(self.path, "every machine that runs a first or a last stage needs it"):
            same = self.contents in ("", sampled_hash(self.path))
            require(same, str(self.path), "the contents that the file has on the first machine", "others", DataError)
            return np.memmap(self.path, self.dtype, "r", HEADER_BYTES, (self.count,))


def open_tokens(path: Path, classes: int) -> TokenFile:
    """Open a file of tokens with llm.c's header.

    Args:
        path: The file.
        classes: Number of different tokens.

    Raises:
        DataError: If the file can't be read, has another header or no tokens, its size does not agree with its header, or its last
            :data:`LONGEST_RUN` tokens have equal low bytes.
    """
    with reading(path, HELP), path.open("rb") as file:
        head, size = file.read(HEADER_BYTES), path.stat().st_size
        file.seek(max(HEADER_BYTES, size - 4 * LONGEST_RUN))
        end = file.read()
    magic, version, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    found = "another magic number" if magic not in FORMATS else f"{size} bytes"
    require(magic in FORMATS and size >= HEADER_BYTES, str(path), f"the header of llm.c, {HEADER_BYTES} bytes", found, DataError)
    expected, dtype = FORMATS[magic]
    require(version == expected, str(path), f"version {expected} of llm.c's format", version, DataError)
    present = (size - HEADER_BYTES) / dtype.itemsize
    require(present == count, str(path), f"{count} tokens, as its header says", f"{present:.15g}", DataError)
    require(count > 0, str(path), "tokens", "none", DataError)
    last = np.frombuffer(end, dtype)[-LONGEST_RUN:] & 255
    found = f"{last[0]} {LONGEST_RUN} times (an interrupted download, or big-endian numbers?)"
    require(len({*last.tolist()}) > 1 or len(last) < LONGEST_RUN, str(path), "different low bytes at the end", found, DataError)
    return TokenFile(path, dtype, count, classes)


@dataclass(frozen=True, eq=False)
class Windows:
    """Reader of windows of one or several sequences. No window crosses the end of a sequence.

    Attributes:
        sequences: The sequences of tokens, in memory or in files: they have a length and are indexed by arrays of positions.
        size: Tokens T of a window.
        offset: 0 for inputs, 1 for targets, which are the next tokens.
        whole: Whether to leave out the last tokens of a sequence if they don't fill a window (training). Otherwise, targets past
            the end are -100 (testing).
    """

    sequences: Sequence[Any]
    size: int
    offset: int
    whole: bool

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Number of windows up to the end of each sequence."""
        predicted = np.array([max(len(tokens) - 1, 0) for tokens in self.sequences])
        return np.cumsum(predicted // self.size if self.whole else -(-predicted // self.size))

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        """Return int64 inputs (B, T) or int64 targets (B·T,).

        With a seed, each window starts up to T − 1 tokens later, by a number that depends on the seed and the window only.
        """
        windows = indices.numpy()
        owners = np.searchsorted(self.ends, windows, side="right")
        rows = [self._row(owner, window, seed) for owner, window in zip(owners.tolist(), windows.tolist(), strict=True)]
        tokens = torch.from_numpy(np.stack(rows))
        return tokens.flatten() if self.offset else tokens

    def _row(self, owner: int, window: int, seed: int | None) -> NDArray[np.int64]:
        tokens = self.sequences[owner]
        last = len(tokens) - 1
        start = (window - (int(self.ends[owner - 1]) if owner else 0)) * self.size
        if seed is not None and (shift := derive_seed(seed, window) % self.size):
            start = min(start + shift, last - self.size)
        positions = np.arange(start + self.offset, start + self.offset + self.size)
        row: NDArray[np.int64] = tokens[positions.clip(max=last)].astype(np.int64)
        if self.offset:
            row[positions > last] = IGNORED
        return row


def _windows(sequences: Sequence[Any], size: int, whole: bool) -> Split:
    """Return the windows of sequences. Arguments as for :class:`Windows`."""
    inputs, targets = (Windows(sequences, size, offset, whole) for offset in (0, 1))
    return Split(int(inputs.ends[-1]), inputs, targets, epoch_seed=True, in_memory=True)


def text(root: str | Path | None = None, size: int = 256, validation: Positive = 0.1) -> Dataset:
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
    path = folder_of(root, "text", TEXT_HELP)
    require_text(raw := read(path, TEXT_HELP), path)
    require(json_form(path) is None, str(path), "text", "JSON (petra tokenize reads the texts of JSON objects in lines)", DataError)
    train, test = np.split(np.frombuffer(raw, np.uint8), [round(len(raw) * (1 - validation))])
    fits, expected = len(train) > size and len(test) >= 2, f"at least {size + 1} bytes for training and 2 for testing"
    require(fits, str(path), expected, f"{len(train)} and {len(test)}", DataError)
    windows = _windows([train], size, True), _windows([test], size, False)
    return Dataset("text", 256, size, *windows, bytes_per_target=1.0, contents=sampled_hash(path)[:12])


def tokens(root: str | Path | None = None, size: int = 256, classes: int = 256, split: Part = "val") -> Dataset:
    """Return files of tokens in windows of ``size`` tokens.

    Files with the word ``train`` in their names (``*.bin``) are for training, and those with ``split`` for evaluation, in the order
    of their names. Windows are adjacent within a file. Augmentation and evaluation windows are those of :func:`text`.

    Args:
        root: Folder of the files.
        size: Tokens of a window.
        classes: Number of different tokens.
        split: Part for evaluation: ``val`` or ``test``.

    Raises:
        ConfigError: If ``size`` or ``split`` is out of range, or the vocabulary has another number of tokens.
        DataError: If files are missing, damaged, too short or equal, or not those of the corpus (:func:`sampled_hash`).
    """
    require(size >= 1, "data.size", "an integer >= 1", size)
    require(split in PARTS[1:], "data.split", alternatives(PARTS[1:]), split)
    folder = folder_of(root, "tokens", HELP)
    corpus = _corpus(folder)
    files = {}
    for part, least in (("train", size + 1), (split, 2)):
        files[part] = [open_tokens(path, classes) for path in _files_of(folder, part)]
        longest, name = max(map(len, files[part]), default=0), str(folder / f"*{part}*.bin")
        require(longest >= least, name, f"files with at least {least} tokens", longest or "none", DataError)
        if short := [file for file in files[part] if len(file) < least]:
            log.warning("%s: left out %d files of less than %d tokens, such as %s", folder, len(short), least, short[0].path.name)
    every, hashes = [file for found in files.values() for file in found], corpus.get("files", {})
    kinds = {str(file.dtype) for file in every}
    require(len(kinds) == 1, str(folder), "files of tokens of one type", " and ".join(sorted(kinds)), DataError)
    distinct = require_distinct(file.path for file in every)
    for found, path in distinct.items():
        fits = not hashes or hashes.get(path.name) == found
        require(fits, str(path), f"the contents whose hash is in {CORPUS}", "others, or a file that it does not name", DataError)
    hash_of = {path: found for found, path in distinct.items()}
    files = {part: [replace(file, contents=hash_of[file.path]) for file in found] for part, found in files.items()}
    train, test = _windows(files["train"], size, True), _windows(files[split], size, False)
    known = corpus.get("classes", classes)
    require(classes == known, "data.classes", f"{known}, the tokens of {folder / CORPUS}", classes)
    for file in files[split] if not hashes else ():  # evaluation comes after a whole epoch
        file.check()
    ratios = {part: _bytes_per_token(folder, part, found, corpus) for part, found in files.items() if corpus}
    form = "tokens", classes, size, train, test, ratios.get(split)
    return Dataset(*form, corpus.get("vocabulary"), delimiter=corpus.get("delimiter"), contents=next(iter(distinct))[:12])


def _files_of(folder: Path, part: str) -> list[Path]:
    """Return the token files of a part, by name. No name may contain two. Log a warning if numbers are missing."""
    found = [path for path in sorted(folder.glob(f"*{part}*.bin")) if part in re.split("[^a-zA-Z]", path.name)]
    similar = [p for p in sorted(folder.iterdir()) if part in p.name.lower() and p.suffix.lower() == ".bin"]
    if unnamed := [p.name for p in similar if not {*PARTS}.intersection(re.split("[^a-zA-Z]", p.name))]:
        text = "%s: left out %d files without the word %s in their names, such as %s"
        log.warning(text, folder, len(unnamed), part, unnamed[0])
    for path in found:
        other = next((other for other in PARTS if other in path.name and other != part), None)
        require(other is None, str(path), f'a name with "{part}" or "{other}", not with both', path.name, DataError)
    numbers = sorted(int(match[1]) for path in found if (match := re.search(r"(\d+)\.bin$", path.name)))
    for a, b in pairwise(numbers):
        if b > a + 1:
            log.warning("%s: no file of %s has a number from %d to %d", folder, part, a + 1, b - 1)
    return found


def _corpus(folder: Path) -> dict[str, Any]:
    """Return the facts of the corpus; empty for files of other programs."""
    path = folder / CORPUS
    if not path.exists():
        return {}
    with reading(path, HELP):
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        fits = type(facts["classes"]) is int and type(facts.get("vocabulary", "")) is str and type(facts.get("files", {})) is dict
    require(fits, str(path), "an integer classes, a text vocabulary, and files with hashes", "others", DataError)
    return facts


def _bytes_per_token(folder: Path, part: str, files: Sequence[TokenFile], corpus: Mapping[str, Any]) -> float:
    """Return the mean number of bytes of text per token of a part, whose files must have as many tokens as the corpus says."""
    facts = found if isinstance(found := corpus.get(part), dict) else {}
    for key in ("tokens", "bytes"):
        value = facts.get(key)
        require(type(value) is int and 0 < value < 2**63, f"{folder / CORPUS}, {part}.{key}", "an integer > 0", value, DataError)
    count = sum(map(len, files))
    require(count == facts["tokens"], str(folder / f"*{part}*.bin"), f"{facts['tokens']} tokens, as in {CORPUS}", count, DataError)
    least = int(facts["tokens"]) // 2  # a token is a byte or more, except for the delimiter of a document
    require(facts["bytes"] >= least, f"{folder / CORPUS}, {part}.bytes", f"at least {least}", facts["bytes"], DataError)
    return float(facts["bytes"]) / int(facts["tokens"])
