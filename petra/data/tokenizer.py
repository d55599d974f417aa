"""Files of tokens from text: a byte-level BPE vocabulary, delimited documents, and a held-out split by documents.

Needs the package ``tokenizers`` (``pip install 'petra[text]'``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from math import nextafter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from petra.data.tokens import CORPUS, FORMATS, HEADER_BYTES
from petra.errors import ConfigError, DataError, first_line, invalid, require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DELIMITER = "<|endoftext|>"
"""Text of the token with which every document begins. Its number in a new vocabulary is 0."""
VOCABULARY = "tokenizer.json"
"""File with the vocabulary, in the format of Hugging Face's ``tokenizers``."""
SHARD_TOKENS = 100_000_000
"""Number of tokens after which a new file begins."""
DOCUMENTS_AT_ONCE = 1000
"""Documents that are encoded in parallel."""


def documents(paths: Iterable[Path], separator: str | None, progress: Callable[[int], object]) -> Iterator[str]:
    """Yield the documents in text files.

    A file ``*.jsonl`` has one document per line, the value of ``text``. Any other file is one document, or several that
    ``separator`` divides. Empty documents and blank lines are left out.

    Args:
        paths: Files with UTF-8 text.
        separator: Text between two documents of a file, or None.
        progress: Called with the number of bytes read since the last call.

    Raises:
        ConfigError: If the separator is empty.
        DataError: If a file can't be read.
    """
    require(separator != "", "--separator", "a text", "nothing")
    for path in paths:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                found: Iterable[str]
                if path.suffix == ".jsonl":
                    found = _texts(path, file)
                else:
                    text = file.read()
                    found = [text] if separator is None else text.split(separator)
                for document in found:
                    progress(len(document.encode()))
                    if document.strip():
                        yield document
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: can't be read as UTF-8 text ({first_line(error)})") from error


def _texts(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """Yield the values of ``text`` in the lines of a file of JSON objects."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        require(isinstance(text, str), f"{path}, line {number}", 'a JSON object with a string "text"', line.strip()[:60], DataError)
        yield text


def train_vocabulary(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE vocabulary (Sennrich et al. 2016; bytes as in Radford et al. 2019, section 2.2).

    Args:
        texts: Documents.
        size: Number of tokens, among them the 256 bytes and the delimiter, which is token 0.

    Raises:
        ConfigError: If ``size`` is too small, or ``tokenizers`` is not installed.
    """
    require(size >= 257, "--vocabulary", "an integer >= 257 (the bytes and the delimiter) or a file", size)
    require_tokenizers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[DELIMITER], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_vocabulary(path: Path) -> Tokenizer:
    """Read a vocabulary in the format of ``tokenizers``. It encodes whole texts, even if the file says to truncate or pad them.

    Raises:
        ConfigError: If ``tokenizers`` is not installed.
        DataError: If the file can't be read.
    """
    require_tokenizers()
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare exceptions
        raise DataError(f"{path}: can't be read as a vocabulary ({first_line(error)})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def require_tokenizers() -> None:
    """Check that the package ``tokenizers`` is installed.

    Raises:
        ConfigError: If it is not.
    """
    if find_spec("tokenizers") is None:
        raise ConfigError("the package tokenizers is not installed; pip install 'petra[text]'")


@dataclass
class _Split:
    """Writer of the token files of one split, each with llm.c's header."""

    folder: Path
    name: str
    dtype: np.dtype[Any]
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    _pending: list[np.ndarray[Any, Any]] = field(default_factory=list)
    _count: int = 0
    _files: list[Path] = field(default_factory=list)

    def add(self, ids: Sequence[int], text: str) -> None:
        """Append a document."""
        self.documents, self.tokens = self.documents + 1, self.tokens + len(ids)
        self.bytes += len(text.encode())
        self._pending.append(np.array(ids, self.dtype))
        self._count += len(ids)
        if self._count >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write the pending documents to a file."""
        if not self._pending:
            return
        content = np.concatenate(self._pending)
        magic, version = next((magic, version) for magic, (version, dtype) in FORMATS.items() if dtype == self.dtype)
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = magic, version, len(content)
        self._files.append(self.folder / f"{self.name}_{len(self._files):06}.bin")
        self._files[-1].write_bytes(header.tobytes() + content.tobytes())
        self._pending, self._count = [], 0

    def remove(self) -> None:
        """Remove the files that were written."""
        for path in self._files:
            path.unlink(missing_ok=True)

    def facts(self) -> dict[str, int]:
        """Return the number of documents, tokens and bytes."""
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes}


def held_out_share(texts: Iterable[str], fraction: float) -> float:
    """Return the fraction for :func:`write_tokens` that holds out about ``fraction`` of the documents, and at least one.

    Raises:
        ConfigError: If ``fraction`` is out of range.
        DataError: If there are fewer than two different documents.
    """
    require(0 < fraction < 1, "--validation", "a number > 0 and < 1, or files", fraction)
    least, most = 1.0, 0.0
    for share in map(_share, texts):
        least, most = min(least, share), max(most, share)
    expected = "at least two different documents (--separator divides a file into documents), or files in --validation"
    require(least < most, "text files", expected, "fewer", DataError)
    return max(fraction, nextafter(least, 1))


def write_tokens(texts: Iterable[str], tokenizer: Tokenizer, folder: Path, validation: float | Iterable[str]) -> dict[str, Any]:
    """Encode documents, and write them to ``folder`` as ``train_*.bin`` and ``val_*.bin``.

    Every document begins with the delimiter. The vocabulary and facts of the corpus are written beside the tokens. After an error,
    no token files remain.

    Args:
        texts: Documents.
        tokenizer: Vocabulary, which must contain :data:`DELIMITER`.
        folder: Folder for the files, new or without token files.
        validation: Documents for validation; or the fraction of ``texts`` that is for validation. The fraction applies to a hash of
            the document, so equal documents are never on both sides.

    Returns:
        Facts of the corpus: ``classes``, ``delimiter``, and the documents, tokens and bytes of ``train`` and ``val``.

    Raises:
        ConfigError: If a value is out of range, or the folder contains token files.
        DataError: If a split is empty, or a file can't be written.
    """
    delimiter = tokenizer.token_to_id(DELIMITER)
    if delimiter is None:
        raise invalid("--vocabulary", f"a vocabulary with the token {DELIMITER}", "one without it")
    classes = tokenizer.get_vocab_size()
    dtype = np.dtype("<u2" if classes <= 2**16 else "<u4")
    train, held_out = (_Split(folder, name, dtype) for name in ("train", "val"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require(not any(folder.glob("*.bin")), "--out", "a folder without token files", folder)
        with _removed_on_error(train, held_out):
            _divide(texts, tokenizer, delimiter, validation, train, held_out)
            facts = {"classes": classes, "delimiter": delimiter, "train": train.facts(), "val": held_out.facts()}
            tokenizer.save(str(folder / VOCABULARY))
            (folder / CORPUS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{folder}: can't be written ({error.strerror})") from error
    return facts


@contextmanager
def _removed_on_error(*splits: _Split) -> Iterator[None]:
    """Remove the files of the splits if the context ends with an error."""
    try:
        yield
    except BaseException:
        for split in splits:
            split.remove()
        raise


def _divide(
    texts: Iterable[str], tokenizer: Tokenizer, delimiter: int, validation: float | Iterable[str], train: _Split, held_out: _Split
) -> None:
    """Write documents to the two splits, see :func:`write_tokens`."""
    fraction = validation if isinstance(validation, float) else 0.0
    for text, ids in _encoded(texts, tokenizer):
        (held_out if _share(text) < fraction else train).add([delimiter, *ids], text)
    if not isinstance(validation, float):
        for text, ids in _encoded(validation, tokenizer):
            held_out.add([delimiter, *ids], text)
    for key, split in (("text files", train), ("--validation", held_out)):
        require(split.documents > 0, key, f"at least one document for {split.name}", "none", DataError)
    train.flush()
    held_out.flush()


def _encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Yield each document with its tokens."""
    source = iter(texts)
    while batch := list(islice(source, DOCUMENTS_AT_ONCE)):
        for text, encoding in zip(batch, tokenizer.encode_batch_fast(batch, add_special_tokens=False), strict=True):
            yield text, encoding.ids


def _share(text: str) -> float:
    """Return a number from 0 to 1 that depends on the document only."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
