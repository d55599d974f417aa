"""Files and folders of data sets, with errors that say where to get them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Literal, TypeVar

from petra.errors import DataError, PetraError, first_line, invalid, require, user_path

log = logging.getLogger(__name__)
Item = TypeVar("Item")

TOOLS = {
    *("lost+found", "FOUND.000", "System Volume Information", "$RECYCLE.BIN", "$Recycle.Bin", "RECYCLER", "Thumbs", "__pycache__"),
    *("@eaDir", "@tmp", "@Recycle", "@Recently-Snapshot", "#recycle", "#snapshot", "Network Trash Folder", "Temporary Items"),
}
"""Folders that file systems, file servers and tools leave."""
THREADS, AT_ONCE = 16, 500
"""Threads that open files, which wait for disks and servers, and files that each opens at a time."""
NAMED = 5
"""Most files that an error names."""
FIRST_LINES = 20
"""Lines by which JSON is recognised."""
BLOCKS, BLOCK = 16, 4096
"""Number and bytes of the blocks that :func:`sampled_hash` reads."""


def folder_of(root: str | Path | None, name: str, help: str) -> Path:
    """Return ``data.root`` as an absolute path.

    Args:
        root: The setting.
        name: Name of the data set.
        help: Instructions for the error message.

    Raises:
        PetraError: If ``root`` is None, or begins with ``~`` and the home folder is unknown.
    """
    if root is None:
        raise invalid("data.root", f"a path to the files of {name}", f"none; {help}", DataError)
    return user_path("data.root", root).absolute()


@contextmanager
def reading(path: Path, help: str = "", what: str = "") -> Iterator[None]:
    """Name a file or folder in the errors of the ``with`` block that reads it. Decoders raise many undocumented types.

    Args:
        path, help, what: The file, instructions, and what it is read as, for the error message.

    Raises:
        DataError: If it can't be read, or is a pipe or a device, which may wait or never end.
    """
    try:
        require(path.is_file() or path.is_dir() or not path.exists(), str(path), "a file", "a pipe or a device", DataError)
        yield
    except PetraError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise DataError("; ".join(filter(None, [f"{path}: can't be read{what} ({reason})", help]))) from error


def listed(folder: Path, help: str) -> list[str]:
    """Return the names in a folder, sorted. Hidden ones, which notebooks and archives of macOS leave, are left out.

    Raises:
        DataError: If it can't be read.
    """
    with reading(folder, help):
        return sorted(name for name in os.listdir(folder) if not name.startswith((".", "__MACOSX")))


def folders_in(folder: Path, help: str) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones and :data:`TOOLS`, which a warning names.

    Raises:
        DataError: If it can't be read.
    """
    names = [name for name in listed(folder, help) if (folder / name).is_dir()]
    if left := sorted(TOOLS.intersection(names)):
        log.warning("%s: left out %s, which file systems or tools leave", folder, ", ".join(left))
    return [name for name in names if name not in TOOLS]


def require_all(check: Callable[[Item], object], items: Sequence[Item]) -> None:
    """Call a check for each item in several threads, such as one that reads the header of a file.

    Raises:
        DataError: The first that a check raises, with the names of other files.
    """

    def failures(part: Sequence[Item]) -> list[str]:
        found = []
        for item in part:
            try:
                check(item)
            except DataError as error:
                found.append(str(error))
        return found

    with ThreadPoolExecutor(THREADS) as threads:
        parts = (items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE))
        first, *others = [*chain.from_iterable(threads.map(failures, parts))] or [""]
    names = ", ".join(Path(error.partition(": ")[0]).name for error in others[: NAMED - 1])
    if first:
        raise DataError(first + (f"; and {len(others)} more: {names}{', …' * (len(others) >= NAMED)}" if others else ""))


def read(path: Path, help: str, md5: str | None = None) -> bytes:
    """Return the content of a file.

    Args:
        path: The file.
        help: Instructions for error messages.
        md5: Expected md5, or None for any.

    Raises:
        DataError: If the file can't be read, or has another md5.
    """
    with reading(path, help):
        content = path.read_bytes()
    if md5 is not None and (actual := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
        raise invalid(str(path), f"a file with md5 {md5}", f"one with md5 {actual}, which is damaged; {help}", DataError)
    return content


def require_text(content: bytes, path: Path, line: int = 1) -> None:
    """Check that bytes are text, and not what a failed download left. A page of HTML is a warning.

    Args:
        content: Bytes of the file, or of a line.
        path: The file, for error messages.
        line: Number of the line in which the bytes begin.

    Raises:
        DataError: If they contain NUL, as UTF-16, compressed files and images do, or are a pointer of Git LFS.
    """
    if (position := content.find(b"\0")) >= 0:
        line += content.count(b"\n", 0, position)
        raise invalid(f"{path}, line {line}", "text in UTF-8", "a NUL byte, as in a binary file or UTF-16", DataError)
    require(not content.startswith(b"version https://git-lfs"), str(path), "text", "a pointer of Git LFS (git lfs pull)", DataError)
    if content[:32].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        log.warning("%s: begins like a page of HTML; a failed download?", path)


def json_form(path: Path) -> Literal["lines", "document"] | None:
    """Return whether a file contains a JSON object in each line or JSON of another form, or None for other text.

    The content decides, whatever the name is: the first lines, of which half must be objects, so that a broken one doesn't make a
    text of the others; and if the file begins like JSON, all of it.

    Raises:
        DataError: If the file can't be read.
    """
    with reading(path), path.open("rb") as file:
        lines = filter(bytes.strip, chain.from_iterable(map(bytes.splitlines, file)))
        first = [line.removeprefix(b"\xef\xbb\xbf").strip() for line in islice(lines, FIRST_LINES)]
        if first and 2 * sum(line.startswith(b"{") and _is_object(line) for line in first) >= len(first):
            return "lines"
        if not first or not first[0].startswith((b"{", b"[")):
            return None
        file.seek(0)
        text = file.read().decode("utf-8-sig", "replace").strip()
    with suppress(ValueError, RecursionError):  # of a text
        end = json.JSONDecoder().raw_decode(text)[1]
        if not text[end:].strip() or text[end:].lstrip()[0] in "{[,":  # one value, or several after each other
            return "document"
    return None


def _is_object(line: bytes) -> bool:
    with suppress(ValueError, RecursionError):
        return isinstance(found := json.loads(line), dict) and len(found) > 0
    return False


def sampled_hash(path: Path) -> str:
    """Return the SHA-256 of a file's size and of 16 blocks of 4 KiB at equal distances: of all bytes up to 64 KiB.

    It tells files apart at the cost of 16 reads, however large they are, but finds no change between the blocks.
    """
    with reading(path), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for i in range(BLOCKS):
            file.seek(max(0, size - BLOCK) * i // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def require_distinct(paths: Iterable[Path]) -> dict[str, Path]:
    """Return files by their :func:`sampled_hash`. A DataError names two with the same, as in a test on the training data."""
    known: dict[str, Path] = {}
    for path in paths:
        other = known.setdefault(sampled_hash(path), path)
        require(other is path, str(path), "other contents than any other file of the data", f"those of {other}", DataError)
    return known
