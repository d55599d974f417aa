"""Files and folders of data sets, with errors that say where to get them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from petra.errors import DataError, invalid


def folder_of(root: str | Path | None, name: str, help: str) -> Path:
    """Return ``data.root`` as an absolute path.

    Args:
        root: The setting.
        name: Name of the data set.
        help: Instructions for the error message.

    Raises:
        DataError: If ``root`` is None.
    """
    if root is None:
        raise invalid("data.root", f"a path to the files of {name}", f"none; {help}", DataError)
    return Path(root).expanduser().absolute()


def listed(folder: Path, help: str) -> list[str]:
    """Return the names in a folder, sorted.

    Raises:
        DataError: If it can't be read.
    """
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(f"{folder}: can't be read ({error.strerror}); {help}") from error


def read(path: Path, help: str, md5: str | None = None) -> bytes:
    """Return the content of a file.

    Args:
        path: The file.
        help: Instructions for error messages.
        md5: Expected md5, or None for any.

    Raises:
        DataError: If the file can't be read, or has another md5.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror}); {help}") from error
    if md5 is not None and (actual := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
        raise invalid(str(path), f"a file with md5 {md5}", f"one with md5 {actual}, which is damaged; {help}", DataError)
    return content
