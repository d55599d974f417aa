"""Image files in the formats of CIFAR and ImageNet32. They are checked before use, and can't run code."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petra.errors import DataError, invalid, require

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


def read_images(path: Path, key: str, labels: range, help: str, md5: str | None = None) -> Batch:
    """Return images and labels of a file.

    Args:
        path: ``*.npz``, whose own checksums are verified; ``*.bin``, rows of two labels (of which the second is used) and an image;
            or a pickle of a dictionary with the images as ``data``.
        key: Name of the labels.
        labels: Accepted labels. The result has labels 0, 1, ... instead.
        help: Instructions for error messages.
        md5: Expected md5, or None for any.

    Raises:
        DataError: If the file can't be read or has another md5, or if an array is missing or has another shape, type or range.
    """
    content = read(path, help, md5)
    try:
        if path.suffix == ".bin":
            rows = np.frombuffer(content, np.uint8).reshape(-1, 2 + IMAGE_BYTES)
            arrays = {"data": rows[:, 2:], key: rows[:, 1]}
        else:
            arrays = _unzipped(content) if path.suffix == ".npz" else unpickled(content)
        images, numbers = np.asarray(arrays["data"]), np.asarray(arrays[key])
        fits = images.dtype == np.uint8 and images.ndim == 2 and images.shape[1] == IMAGE_BYTES and len(images) > 0
        require(fits, "data", f"uint8[N, {IMAGE_BYTES}]", f"{images.dtype}{list(images.shape)}", DataError)
        fits = numbers.dtype.kind in "iu" and numbers.shape == (len(images),)
        require(fits, key, f"integers[{len(images)}]", f"{numbers.dtype}{list(numbers.shape)}", DataError)
        least, most = numbers.min(), numbers.max()
        require(
            bool(labels[0] <= least and most <= labels[-1]),
            key,
            f"integers from {labels[0]} to {labels[-1]}",
            f"integers from {least} to {most}",
            DataError,
        )
    except Exception as error:  # damaged content can raise any exception
        reason = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise DataError(f"{path}: can't be read as a file of images ({reason}); {help}") from error
    return images, numbers.astype(np.int64) - labels.start


def unpickled(content: bytes) -> dict[str, Any]:
    """Return the dictionary in a pickle of plain containers and numpy arrays. A pickle of anything else raises any exception."""
    loaded = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in loaded.items()}


def _unzipped(content: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        # zipfile verifies the checksum of a member when it has read all of it, and np.load might read less.
        members = {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}
    return {name: np.lib.format.read_array(io.BytesIO(member)) for name, member in members.items()}


def joined(batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """Return all images, uint8 (N, 3, 32, 32), and labels, int16 (N,). Needs memory for the result and one batch."""
    images, numbers = np.empty((0, IMAGE_BYTES), np.uint8), []
    for batch, labels in batches:
        # Resized in place, since two copies of ImageNet32 need 8 GB. Nothing else refers to the array.
        images.resize((len(images) + len(batch), IMAGE_BYTES), refcheck=False)
        images[-len(batch) :] = batch
        numbers.append(labels)
    return torch.from_numpy(images).view(-1, 3, 32, 32), torch.from_numpy(np.concatenate(numbers).astype(np.int16))


_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): lambda code, *flags: np.dtype(code),  # numpy warns of the integers that old pickles have as flags
}


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler of plain containers and arrays only. Pickles can call any function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return _ALLOWED[module, name]
