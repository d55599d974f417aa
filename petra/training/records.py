"""Files of a run: its folder and the lock on it, JSON and JSON Lines files, written so that they are never incomplete."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from math import isfinite, nan
from pathlib import Path
from typing import IO, Any

from petra.errors import DataError, first_line, invalid, require

LOCK = ".lock"
"""Name of the lock's file in the folder. The file remains after the run, when no process holds its lock."""
PART = ".part"
"""Suffix of files and folders that are not complete yet."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file, none if it doesn't exist, with NaN for null. An incomplete last line is left out.

    Raises:
        DataError: If the file can't be read, or another line is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read ({first_line(error)})") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise DataError(f"{path}: expected a JSON object in line {number}, got {line[:40]!r}") from error
        require(isinstance(row, dict), str(path), f"a JSON object in line {number}", line[:40], DataError)
        rows.append({key: nan if value is None else value for key, value in row.items()})
    return rows


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with None (null) for numbers that are not finite, which JSON lacks."""
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the lock on a folder for the duration of the context. Create the folder if it does not exist.

    The operating system releases the lock when the process ends, however it ends. NFS passes the lock to the server, so it also
    holds between machines. The lock is a POSIX record lock: child processes do not inherit it.

    Yields:
        Whether the lock is held. False if the file system has no locks.

    Raises:
        ConfigError: If another process holds the lock, or if the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise invalid("run_dir", "a folder that can be created", f"{folder} ({error.strerror})") from error
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                owner = file.read().strip() or "another process"
                raise invalid("run_dir", "a folder that no other run uses now", f"{folder}, in use by {owner}") from error
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            yield False
            return
        # A run that failed to start may have removed the file since it was opened.
        if not (folder / LOCK).exists() or os.fstat(descriptor).st_ino != (folder / LOCK).stat().st_ino:
            raise invalid("run_dir", "a folder that no other run uses now", f"{folder}, in use by another process")
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
        file.flush()
        yield True


def new_run_folder(path: Path) -> Path:
    """Create the folder of a run. It may exist if it holds nothing but a lock and incomplete files of a run that was killed.

    Raises:
        ConfigError: If it contains other files or cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        used = any(found.suffix != PART and found.name != LOCK for found in path.iterdir())
    except OSError as error:
        raise invalid("run_dir", "a folder that can be created", f"{path} ({error.strerror})") from error
    if used:
        raise invalid("run_dir", "a new or empty folder", f"{path}, which contains files")
    return path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that is either complete or absent.

    Raises:
        DataError: If it cannot be written.
    """
    write_text_atomically(path, json.dumps(content, indent=2) + "\n")


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file that is either complete or absent.

    Raises:
        DataError: If it cannot be written.
    """
    with writing(path), replaced(path) as file:
        file.write(text.encode())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of the file system to errors that name the file.

    Raises:
        DataError: If the file system raises an error inside the ``with`` block.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that is either complete and synced to the disk, or as it was before.

    Raises:
        OSError: If it cannot be written, or if the body raises any error.
    """
    draft = path.with_name(path.name + PART)
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except Exception as error:  # each format of weights has its own errors for a full disk
        draft.unlink(missing_ok=True)
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
            cause = cause.__cause__ or cause.__context__
        raise (cause or OSError(errno.EIO, first_line(error))) from error
