"""Files of images in the form of CIFAR and ImageNet32: checked before use, and unable to run code or exhaust memory."""

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

from petra.errors import DataError

PIXELS = 3 * 32 * 32
Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images (N, 3072), red before green before blue and row by row, and their labels (N,) from 0 on."""


def folder_of(root: str | Path | None, name: str, help: str) -> Path:
    """``data.root`` as a path, or an error for one that isn't given."""
    if root is None:
        raise DataError(f"data.root: not given, but {name} is read from files; {help}")
    return Path(root).expanduser().absolute()


def read_checked(path: Path, md5: str, help: str) -> bytes:
    """The content of a file that has the given md5, or an error that names both sums."""
    content = read(path, help)
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise DataError(f"{path}: damaged, its md5 is {found} and should be {md5}; {help}")
    return content


def read(path: Path, help: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror}); {help}") from error


def unpickled(path: Path, content: bytes, help: str) -> dict[str, Any]:
    """The dictionary in a pickle of plain containers and numpy arrays."""
    try:
        found = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__} instead of a dictionary")
        return {key.decode() if isinstance(key, bytes) else str(key): _plain(value) for key, value in found.items()}
    except Exception as error:  # a damaged pickle can raise any
        raise _refused(path, error, help) from error


def unzipped(path: Path, content: bytes, help: str) -> dict[str, Any]:
    """The arrays in an npz file, its checksums verified."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            # zipfile compares the checksum of a member that is read to its end, and np.load might stop before.
            members = {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}
        return {name: np.lib.format.read_array(io.BytesIO(member)) for name, member in members.items()}
    except Exception as error:  # a damaged archive can raise many
        raise _refused(path, error, help) from error


def as_batch(path: Path, found: dict[str, Any], key: str, labels: range, help: str) -> Batch:
    """Images and labels of a dictionary; the labels, under ``key``, lie in the given range and become 0, 1, …"""
    try:
        images, numbers = np.asarray(found["data"]), np.asarray(found[key])
        if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != PIXELS or not len(images):
            raise ValueError(f"data are {images.dtype}{list(images.shape)} and should be uint8[N, {PIXELS}]")
        if numbers.dtype.kind not in "iu" or numbers.shape != (len(images),):
            raise ValueError(f"{key} are {numbers.dtype}{list(numbers.shape)} and should be integers[{len(images)}]")
        if numbers.min() < labels.start or numbers.max() >= labels.stop:
            raise ValueError(f"{key} reach from {numbers.min()} to {numbers.max()} and should from {labels[0]} to {labels[-1]}")
    except (KeyError, ValueError) as error:
        raise _refused(path, error, help) from error
    return images, numbers.astype(np.int64) - labels.start


def joined(batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """All images uint8 (N, 3, 32, 32) and labels int16 (N,), holding no more than one batch beside them."""
    images, numbers = np.empty((0, PIXELS), np.uint8), []
    for some, labels in batches:
        # In place, since ImageNet32 twice would be 8 GB; nothing refers to the array.
        images.resize((len(images) + len(some), PIXELS), refcheck=False)
        images[-len(some) :] = some
        numbers.append(labels)
    return torch.from_numpy(images).view(-1, 3, 32, 32), torch.from_numpy(np.concatenate(numbers).astype(np.int16))


def _refused(path: Path, error: Exception, help: str) -> DataError:
    text = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return DataError(f"{path}: not a file of images ({text}); {help}")


class _Array:
    """A numpy array as a pickle describes it; numpy itself takes no part, since a wrong description could make it crash."""

    def __init__(self, *arguments: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def plain(self) -> NDArray[Any]:
        _, shape, dtype, fortran, content = self.state
        if not isinstance(dtype, _Dtype) or fortran or not isinstance(content, bytes):
            raise ValueError("an array of another form")
        return np.frombuffer(content, dtype.plain()).reshape(shape)


class _Dtype:
    """A numpy number type as a pickle describes it."""

    def __init__(self, code: str | bytes, *flags: object) -> None:
        self.code, self.state = code, (0, "|")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def plain(self) -> np.dtype[Any]:
        order, code = (part.decode() if isinstance(part, bytes) else part for part in (self.state[1], self.code))
        if order not in ("<", ">", "|") or code not in ("u1", "u2", "i2", "i4", "i8", "f4", "f8"):
            raise ValueError(f"an array of {order}{code}")
        return np.dtype(order + code)


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads plain containers and arrays only, because a pickle may call any function and md5 can be forged."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def _plain(value: object) -> object:
    return value.plain() if isinstance(value, _Array) else value
