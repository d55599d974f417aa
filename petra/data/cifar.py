"""CIFAR-10 from its authors' files (Krizhevsky 2009, "Learning multiple layers of features from tiny images")."""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from petra.data.dataset import ArrayDataset
from petra.errors import DataError

FOLDER = "cifar-10-batches-py"
MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
HELP = (
    "download cifar-10-python.tar.gz (md5 c58f30108f718f92721af3b95e74349a) from "
    "https://www.cs.toronto.edu/~kriz/cifar.html, unpack it, and set data.root=<folder that contains "
    f"{FOLDER}>"
)

_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def cifar10(root: str | Path | None) -> ArrayDataset:
    """The 50,000 training and 10,000 test images in ``root``/cifar-10-batches-py, each file checked by its md5.

    Raises :class:`petra.errors.DataError` for a root that isn't given and for files that are missing or damaged.
    """
    if root is None:
        raise DataError(f"data.root: not given, but cifar10 is read from files; {HELP}")
    train, test = [name for name in MD5 if name != "test_batch"], ["test_batch"]
    (train_images, train_labels), (test_images, test_labels) = (_read(Path(root), names) for names in (train, test))
    return ArrayDataset(
        name="cifar10",
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        flip=True,
    )


def _read(root: Path, names: list[str]) -> tuple[Tensor, Tensor]:
    batches = [_read_batch(root.expanduser().absolute() / FOLDER / name) for name in names]
    images = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(images), torch.tensor([label for batch in batches for label in batch[b"labels"]])


def _read_batch(path: Path) -> dict[bytes, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror}); {HELP}") from error
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != MD5[path.name]:
        raise DataError(f"{path}: damaged, its md5 is {found} and should be {MD5[path.name]}; {HELP}")
    try:
        batch: dict[bytes, Any] = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise DataError(f"{path}: not a CIFAR-10 file ({error}); {HELP}") from error
    return batch


class _ArrayUnpickler(pickle.Unpickler):
    """Reads numpy arrays and plain containers only, because a pickle may call any function and md5 can be forged."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]
