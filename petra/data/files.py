"""Image files in the formats of CIFAR and ImageNet32. They are checked before use, and can't run code or exhaust memory."""

from __future__ import annotations

import hashlib
import io
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petra.errors import DataError, invalid

IMAGE_BYTES = 3 * 32 * 32
Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images (N, 3072) and their labels (N,), starting at 0. An image is stored channel by channel (RGB) and row by row."""


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


def read_checked(path: Path, md5: str, help: str, size: int | None = None) -> bytes:
    """Return the content of a file.

    Args:
        size: Expected size in bytes, or None if only the md5 is known.

    Raises:
        DataError: If the file can't be read, or has another size or md5.
    """
    content = read(path, help)
    if size is not None and len(content) != size:
        raise invalid(str(path), f"a file of {size} bytes", f"one of {len(content)}, which is damaged; {help}", DataError)
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != md5:
        raise invalid(str(path), f"a file with md5 {md5}", f"one with md5 {actual}, which is damaged; {help}", DataError)
    return content


def read(path: Path, help: str) -> bytes:
    """Return the content of a file.

    Raises:
        DataError: If the file can't be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror}); {help}") from error


def unpickled(path: Path, content: bytes, help: str) -> dict[str, Any]:
    """Return the dictionary in a pickle of plain containers and numpy arrays.

    Args:
        path: Path of the file, for the error message.
        content: Content of the file.
        help: Instructions for the error message.

    Raises:
        DataError: If the content is damaged, or contains anything else.
    """
    try:
        loaded = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(loaded, dict):
            raise ValueError(f"expected a dictionary, got a {type(loaded).__name__}")
        return {key.decode() if isinstance(key, bytes) else str(key): _plain(value) for key, value in loaded.items()}
    except Exception as error:  # a damaged pickle can raise any exception
        raise _unreadable(path, error, help) from error


def unzipped(path: Path, content: bytes, help: str) -> dict[str, Any]:
    """Return the arrays in an npz file after verifying its checksums. Arguments and errors as for :func:`unpickled`."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            # zipfile verifies the checksum of a member when it has read all of it, and np.load might read less.
            members = {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}
        return {name: np.lib.format.read_array(io.BytesIO(member)) for name, member in members.items()}
    except Exception as error:  # a damaged archive can raise many exceptions
        raise _unreadable(path, error, help) from error


def as_batch(path: Path, content: dict[str, Any], key: str, labels: range, help: str) -> Batch:
    """Return images and labels of a file.

    Args:
        path: Path of the file, for the error message.
        content: Arrays of the file by name. ``data`` are the images.
        key: Name of the labels.
        labels: Accepted labels. The result has labels 0, 1, ... instead.
        help: Instructions for the error message.

    Raises:
        DataError: If an array is missing, or has another shape, type or range.
    """
    try:
        images, numbers = np.asarray(content["data"]), np.asarray(content[key])
        if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != IMAGE_BYTES or not len(images):
            raise invalid("data", f"uint8[N, {IMAGE_BYTES}]", f"{images.dtype}{list(images.shape)}", DataError)
        if numbers.dtype.kind not in "iu" or numbers.shape != (len(images),):
            raise invalid(key, f"integers[{len(images)}]", f"{numbers.dtype}{list(numbers.shape)}", DataError)
        if numbers.min() < labels.start or numbers.max() >= labels.stop:
            expected, got = f"integers from {labels[0]} to {labels[-1]}", f"integers from {numbers.min()} to {numbers.max()}"
            raise invalid(key, expected, got, DataError)
    except (DataError, KeyError, ValueError) as error:
        raise _unreadable(path, error, help) from error
    return images, numbers.astype(np.int64) - labels.start


def joined(batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """Return all images, uint8 (N, 3, 32, 32), and labels, int16 (N,). Needs memory for the result and one batch."""
    images, numbers = np.empty((0, IMAGE_BYTES), np.uint8), []
    for batch, labels in batches:
        # Resized in place, since two copies of ImageNet32 need 8 GB. Nothing else refers to the array.
        images.resize((len(images) + len(batch), IMAGE_BYTES), refcheck=False)
        images[-len(batch) :] = batch
        numbers.append(labels)
    return torch.from_numpy(images).view(-1, 3, 32, 32), torch.from_numpy(np.concatenate(numbers).astype(np.int16))


def _unreadable(path: Path, error: Exception, help: str) -> DataError:
    reason = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return DataError(f"{path}: can't be read as a file of images ({reason}); {help}")


class _Array:
    """Description of a numpy array in a pickle. It is checked before numpy gets it, since a wrong one could crash numpy."""

    def __init__(self, *arguments: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def plain(self) -> NDArray[Any]:
        _, shape, dtype, fortran, content = self.state
        if not isinstance(dtype, _Dtype) or fortran or not isinstance(content, bytes):
            raise ValueError("unsupported array format")
        return np.frombuffer(content, dtype.plain()).reshape(shape)


class _Dtype:
    """Description of a numpy data type in a pickle."""

    def __init__(self, code: str | bytes, *flags: object) -> None:
        self.code, self.state = code, (0, "|")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def plain(self) -> np.dtype[Any]:
        order, code = (part.decode() if isinstance(part, bytes) else part for part in (self.state[1], self.code))
        if order not in ("<", ">", "|") or code not in ("u1", "u2", "i2", "i4", "i8", "f4", "f8"):
            raise ValueError(f"unsupported array type {order}{code}")
        return np.dtype(order + code)


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler of plain containers and arrays only. Pickles can call any function, and a file with a given md5 can be forged."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return _ALLOWED[module, name]


def _plain(value: object) -> object:
    return value.plain() if isinstance(value, _Array) else value
