"""Files of tokens from text: a byte-level BPE vocabulary, delimited documents, and documents held out.

Needs the package ``tokenizers`` (``pip install 'petra[text]'``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate, chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from petra.data.files import json_form, reading, require_text, sampled_hash
from petra.data.tokens import CORPUS, FORMATS, HEADER_BYTES, PARTS
from petra.errors import ConfigError, DataError, alternatives, invalid, require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OPTIONS = {"val": "--validation", "test": "--test"}
"""Option of ``petra tokenize`` for each part that is held out."""
DELIMITER = "<|endoftext|>"
"""Text of the token with which every document begins. Its number in a new vocabulary is 0."""
DELIMITERS = (DELIMITER, "<|begin_of_text|>", "<|im_end|>", "<bos>", "<s>")
"""Tokens that begin a document in the vocabularies of others; the first that a vocabulary has is taken."""
VOCABULARY = "tokenizer.json"
"""File with the vocabulary, in the format of Hugging Face's ``tokenizers``."""
LARGEST = 10_000_000
"""Most tokens of a vocabulary."""
LONGEST_WORD = 512
"""Bytes after which a new vocabulary divides a word, as in text without whitespace."""
FEW = 10
"""Number of documents that a part must be expected to have; with fewer, each document is divided."""
JSON_LINES = (".jsonl", ".ndjson", ".jl", ".jsonlines")
"""Extensions of files that must have a JSON object in each line."""
SHARD_TOKENS = 100_000_000
"""Number of tokens after which a new file begins."""
DOCUMENTS_AT_ONCE = 1000
"""Documents that are encoded in parallel."""


def documents(paths: Iterable[Path], separator: str | None, progress: Callable[[int], object]) -> Iterator[str]:
    """Yield the documents in text files.

    A file of JSON objects in lines, whatever its name (:func:`petra.data.files.json_form`), has one document per line, the value of
    ``text``. Any other file is one document, or several that ``separator`` divides. JSON of another form is refused. Blank lines
    and empty documents are left out. No document may contain the delimiter of documents.

    Args:
        paths: Files with UTF-8 text.
        separator: Text between two documents of a file, or None.
        progress: Called with the number of bytes read since the last call.

    Raises:
        ConfigError: If the separator is empty, or divides no file.
        DataError: If a file can't be read, is neither text nor JSON objects in lines, or contains the delimiter.
    """
    require(separator != "", "--separator", "a text", "nothing")
    divided = separator is None
    for path in paths:
        form, name = json_form(path), path.suffix.lower()
        got = "JSON of another form" if form else "a file *.json with neither"
        usable = form == "lines" if name == ".json" else form != "document"
        require(usable, str(path), "text, or a JSON object in each line", got, DataError)
        in_lines = form == "lines" or name in JSON_LINES
        with reading(path, what=" as UTF-8 text"), path.open("rb") as file:
            if in_lines:
                lines = enumerate(chain.from_iterable(map(bytes.splitlines, file)), 1)
                found: Iterator[tuple[int, str]] = (
                    (i, _text(_decoded(line, path, i), path, i)) for i, line in lines if line.strip()
                )
            else:
                found = _pieces(_decoded(file.read(), path), separator)
            for count, (line, document) in enumerate(found, 1):
                divided = divided or (count > 1 and not in_lines)
                progress(len(document.encode()))
                if (position := document.find(DELIMITER)) >= 0:
                    line += 0 if in_lines else document.count("\n", 0, position)
                    expected = f"text without {DELIMITER} (or --separator '{DELIMITER}')"
                    raise invalid(f"{path}, line {line}", expected, "one with it", DataError)
                if document.strip():
                    yield document
    require(divided, "--separator", "a text that occurs in the files", repr(separator))


def _decoded(content: bytes, path: Path, line: int = 1) -> str:
    """Return the text in a file, or in a line, whose number is ``line``."""
    require_text(content, path, line)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        found = f"the byte 0x{content[error.start]:02x} ({error.reason})"
        raise invalid(f"{path}, line {line}", "text in UTF-8", found, DataError) from error


def _pieces(text: str, separator: str | None) -> Iterator[tuple[int, str]]:
    """Yield the documents of a text, each with the number of the line in which it begins."""
    line = 1
    for piece in text.split(separator) if separator else [text]:
        yield line, piece
        line += (piece + (separator or "")).count("\n")


def _text(line: str, path: Path, number: int) -> str:
    """Return the value of ``text`` in a line of a file of JSON objects."""
    text: object = None
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        text = json.loads(line)["text"]
    if not isinstance(text, str):
        raise invalid(f"{path}, line {number}", 'a JSON object with a string "text"', line.strip()[:60], DataError)
    if wrong := re.search("[\0\ud800-\udfff]", text):  # which JSON can escape
        raise invalid(f"{path}, line {number}", "a text of characters", ascii(wrong[0]), DataError)
    return text


def train_vocabulary(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE vocabulary (Sennrich et al. 2016; bytes as in Radford et al. 2019, section 2.2).

    Args:
        texts: Documents.
        size: Number of tokens, among them the 256 bytes and the delimiter, which is token 0.

    Raises:
        ConfigError: If ``size`` is too small or too large, or ``tokenizers`` is not installed.
    """
    expected = f"an integer from 257 (the bytes and the delimiter) to {LARGEST:,}, or a file"
    require(257 <= size <= LARGEST, "--vocabulary", expected, size)
    require_tokenizers()
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Training takes a time that grows with the square of a word's length.
    short = pre_tokenizers.Split(Regex(f".{{{LONGEST_WORD}}}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False), short])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[DELIMITER], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_vocabulary(path: Path) -> Tokenizer:
    """Read a vocabulary in the format of ``tokenizers``: the file, or a folder with it. It neither truncates nor pads texts.

    Raises:
        ConfigError: If ``tokenizers`` is not installed.
        DataError: If the file can't be read.
    """
    require_tokenizers()
    from tokenizers import Tokenizer

    with reading(path, what=" as a vocabulary"):
        tokenizer = Tokenizer.from_file(str(path / VOCABULARY if path.is_dir() else path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def delimiter_of(tokenizer: Tokenizer) -> int | None:
    """Return the number of the token with which a document begins, or None if the vocabulary has none of :data:`DELIMITERS`."""
    return next((found for name in DELIMITERS if (found := tokenizer.token_to_id(name)) is not None), None)


def classes_of(tokenizer: Tokenizer) -> int:
    """Return the number of classes of a vocabulary: its largest number of a token + 1, since vocabularies may have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a vocabulary's tokens and their numbers, in hexadecimal digits."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def require_tokenizers() -> None:
    """Raise a ConfigError if the package ``tokenizers`` is not installed."""
    if find_spec("tokenizers") is None:
        raise ConfigError("the package tokenizers is not installed; pip install 'petra[text]'")


@dataclass
class _Part:
    """Writer of the token files of one part of the corpus, each with llm.c's header."""

    folder: Path
    name: str
    dtype: np.dtype[Any]
    facts: dict[str, int] = field(default_factory=lambda: {"documents": 0, "tokens": 0, "bytes": 0})
    _pending: list[NDArray[Any]] = field(default_factory=list)
    _files: int = 0
    _written: int = 0

    def add(self, ids: Sequence[int], text: str) -> None:
        """Append a document."""
        for key, count in (("documents", 1), ("tokens", len(ids)), ("bytes", len(text.encode()))):
            self.facts[key] += count
        self._pending.append(np.array(ids, self.dtype))
        if self.facts["tokens"] - self._written >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write the pending documents to a file."""
        if not self._pending:
            return
        content = np.concatenate(self._pending)
        magic, version = next((magic, version) for magic, (version, dtype) in FORMATS.items() if dtype == self.dtype)
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = magic, version, len(content)
        (self.folder / f"{self.name}_{self._files:06}.bin").write_bytes(header.tobytes() + content.tobytes())
        self._files, self._written, self._pending = self._files + 1, self.facts["tokens"], []


@dataclass(frozen=True)
class Division:
    """Rule that divides texts into parts.

    Attributes:
        bounds: Held-out parts with the ends of their intervals, which are adjacent and begin at 0.
        inside: Whether an interval is one of positions in each document, counted from its end, so that every document is divided.
            Otherwise, it is one of hashes: a part contains whole documents, and equal documents are in the same part.
    """

    bounds: Mapping[str, float]
    inside: bool = False

    def pieces(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the parts that contain the document or some of it, each with its text."""
        if not self.inside:
            share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
            yield next((part for part, end in self.bounds.items() if share < end), "train"), text
            return
        right = len(text)
        for part, end in (*self.bounds.items(), ("train", 1.0)):
            position = min(round(len(text) * (1 - end)), right)
            nearest = max(position - LONGEST_WORD, 0), position
            left = max(text.rfind(" ", *nearest), text.rfind("\n", *nearest)) + 1 or position  # the first position of a word
            piece, right = text[left:right], left
            if piece.strip():
                yield part, piece


def divide(texts: Iterable[str], fractions: Mapping[str, float]) -> Division:
    """Return the rule that holds out about a fraction of the texts for each part.

    Documents are divided by a hash. If a part would then have fewer than about :data:`FEW` documents, each document is divided.

    Raises:
        ConfigError: If a fraction is out of range.
    """
    for part, fraction in fractions.items():
        require(0 < fraction < 1, OPTIONS[part], "a number > 0 and < 1, or files", fraction)
    total = sum(fractions.values())
    require(total < 1, " and ".join(OPTIONS[part] for part in fractions), "fractions with a sum < 1", total)
    count = sum(1 for _ in texts)
    return Division(dict(zip(fractions, accumulate(fractions.values()), strict=True)), count * min(fractions.values()) < FEW)


def require_no_tokens(folder: Path) -> None:
    """Check that token files can be written to a folder.

    Raises:
        ConfigError: If it contains token files, a vocabulary or facts of a corpus, or is a file.
    """
    found = [folder] if folder.is_file() else [path for name in (CORPUS, VOCABULARY, "*.bin") for path in sorted(folder.glob(name))]
    if found:
        raise invalid("--out", f"a folder without {CORPUS}, {VOCABULARY} and *.bin", found[0])


def write_tokens(pieces: Iterable[tuple[str, str]], parts: Collection[str], tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Encode documents, and write them to ``folder`` as ``train_*.bin``, ``val_*.bin`` and ``test_*.bin``.

    Every document begins with the delimiter. The vocabulary and facts of the corpus are written beside the tokens. After an error,
    no token files remain.

    Args:
        pieces: The part and the text of each document.
        parts: Parts of the corpus.
        tokenizer: Vocabulary, which must contain one of :data:`DELIMITERS`.
        folder: Folder for the files, new or without files of these names.

    Returns:
        Facts of the corpus: ``classes``, ``delimiter``, ``vocabulary`` (its :func:`fingerprint`), the documents, tokens and bytes
        of each part, and ``files``, the :func:`petra.data.files.sampled_hash` of each file.

    Raises:
        ConfigError: If a value is out of range, or the folder contains such files.
        DataError: If a part is empty, tokens don't give a text back, or a file can't be written.
    """
    delimiter = delimiter_of(tokenizer)
    if delimiter is None:
        raise invalid("--vocabulary", f"a vocabulary with one of the tokens {alternatives(DELIMITERS)}", "one without")
    classes, without = classes_of(tokenizer), f"text without {tokenizer.id_to_token(delimiter)}"
    dtype = np.dtype("<u2" if classes <= 2**16 else "<u4")
    require_no_tokens(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as name:
            drafts = Path(name)
            writers = {part: _Part(drafts, part, dtype) for part in PARTS if part in parts}
            source = iter(pieces)
            while batch := list(islice(source, DOCUMENTS_AT_ONCE)):
                texts = [text for _, text in batch]
                encoded = [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
                # Decoding all takes a seventh of the time of encoding.
                decoded = tokenizer.decode_batch(encoded, skip_special_tokens=False)
                for (_, text), again in zip(batch, decoded, strict=True):
                    got = f"{again[:40]!r} for {text[:40]!r}"
                    require(again == text, "--vocabulary", "a vocabulary that gives the text back", got, DataError)
                for (part, text), ids in zip(batch, encoded, strict=True):
                    if delimiter in ids:
                        start = max(text.find(str(tokenizer.id_to_token(delimiter))) - 20, 0)
                        raise invalid(part, without, repr(text[start : start + 60]), DataError)
                    writers[part].add([delimiter, *ids], text)
            for part, writer in writers.items():
                require(writer.facts["documents"] > 0, OPTIONS.get(part, "text files"), f"a document for {part}", "none", DataError)
                writer.flush()
            vocabulary = {"classes": classes, "delimiter": delimiter, "vocabulary": fingerprint(tokenizer)}
            facts = vocabulary | {part: writer.facts for part, writer in writers.items()}
            hashes = {path.name: sampled_hash(path) for path in sorted(drafts.iterdir())}
            facts["files"] = hashes
            tokenizer.save(str(drafts / VOCABULARY))
            (drafts / CORPUS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            for name in (CORPUS, VOCABULARY, *hashes):  # if killed here, no tokens are without their facts
                (drafts / name).replace(folder / name)
    except OSError as error:
        raise DataError(f"{folder}: can't be written ({error.strerror})") from error
    return facts
