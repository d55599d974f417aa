"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009, "Learning multiple layers of features from tiny images"), and ImageNet32 (Chrabaszcz et
al. 2017, "A downsampled variant of ImageNet as an alternative to CIFAR"): images of 32x32 pixels in the original pickles."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from petra.data.arrays import array_dataset
from petra.data.dataset import Dataset
from petra.data.files import folder_of, read
from petra.data.preparation import Moments
from petra.errors import DataError, invalid

CIFAR_HELP = "download {} from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it, and set data.root=<folder that contains {}>"
IMAGENET32_HELP = (
    "download Imagenet32_train.zip and Imagenet32_val.zip from https://image-net.org/download-images (downsampled image data, "
    "32x32), unpack both into one folder, and set data.root to it"
)


@dataclass(frozen=True)
class Release:
    """A data set in the format in which it is published.

    Attributes:
        name: Name of the data set.
        help: Where to get the files.
        folder: Folder of the files in ``data.root``.
        files: md5 of each file by file name, in order; the last one has the test images. A file is a pickle of a dictionary with
            the images as ``data``: uint8 (N, 3072), each channel by channel (RGB) and row by row.
        labels: Key of the labels.
        first: Label of the first class.
        classes: Number of classes.
        names: File with the names of the classes, their key, and the file's md5; or None. If the file is missing, classes have no
            names.
        moments: Mean and standard deviation of each channel. None: those of the training images.
    """

    name: str
    help: str
    files: dict[str, str]
    classes: int
    folder: str = ""
    labels: str = "labels"
    first: int = 0
    names: tuple[str, str, str] | None = None
    moments: Moments | None = None

    def read(self, root: str | Path | None, mean_image: bool = False) -> Dataset:
        """Read all files, after checking their md5. Arguments and errors as for :func:`cifar10`."""
        folder = folder_of(root, self.name, self.help) / self.folder
        paths = [folder / file for file in self.files]
        train, test = self._joined(paths[:-1]), self._joined(paths[-1:])
        classes = tuple[str, ...]()
        if self.names is not None and (folder / self.names[0]).exists():
            file, key, md5 = self.names
            classes = tuple(name.decode() for name in _unpickled(folder / file, self.help, md5)[key])
        return array_dataset(self.name, self.classes, train, test, moments=self.moments, mean_image=mean_image, names=classes)

    def _joined(self, paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
        """Return all images, uint8 (N, 3, 32, 32), and labels, int16 (N,). Needs memory for the result and one file."""
        images, labels = np.empty((0, 3072), np.uint8), list[int]()
        for path in paths:
            file = _unpickled(path, self.help, self.files[path.name])
            # Resized in place, since two copies of ImageNet32 need 8 GB. Nothing else refers to the array.
            images.resize((len(images) + len(file["data"]), 3072), refcheck=False)
            images[-len(file["data"]) :] = file["data"]
            labels += file[self.labels]
        return torch.from_numpy(images).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int16) - self.first


def _unpickled(path: Path, help: str, md5: str) -> dict[str, Any]:
    """Return the dictionary in a pickle of plain containers and numpy arrays."""
    unpickler = _ArrayUnpickler(io.BytesIO(read(path, help, md5)), encoding="bytes")
    unpickler.path = path
    loaded = unpickler.load()
    return {key.decode() if isinstance(key, bytes) else key: value for key, value in loaded.items()}


_ALLOWED = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0] for core in ("core", "_core")},
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): lambda code, *flags: np.dtype(code),  # numpy warns of the integers that old pickles have as flags
}


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler of plain containers and arrays only. Pickles can call any function."""

    path: Path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise invalid(str(self.path), "a pickle of plain containers and arrays", f"one with {module}.{name}", DataError)
        return _ALLOWED[module, name]


CIFAR10 = Release(
    name="cifar10",
    help=CIFAR_HELP.format("cifar-10-python.tar.gz (md5 c58f30108f718f92721af3b95e74349a)", "cifar-10-batches-py"),
    folder="cifar-10-batches-py",
    files={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    classes=10,
    names=("batches.meta", "label_names", "5ff9c542aee3614f3951f8cda6e48888"),
    moments=((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
)
CIFAR100 = Release(
    name="cifar100",
    help=CIFAR_HELP.format("cifar-100-python.tar.gz (md5 eb9058c3a382ffc7106e4002c42a8d85)", "cifar-100-python"),
    folder="cifar-100-python",
    files={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    labels="fine_labels",
    classes=100,
    names=("meta", "fine_label_names", "7973b15100ade9c7d40fb424638fde48"),
    moments=((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
)
IMAGENET32 = Release(
    name="imagenet32",
    help=IMAGENET32_HELP,
    files={
        "train_data_batch_1": "6c4495e65cd24a8c3019857ef9b758ee",
        "train_data_batch_2": "3dd727de4155836807dfc19f98c9fe70",
        "train_data_batch_3": "03d3dc4e850e23e1d526f268a0196296",
        "train_data_batch_4": "876f7e6d6ddb1f52ecb654ffdc8293f6",
        "train_data_batch_5": "c789bcdd1feed34a9bc58598a1a1bf7d",
        "train_data_batch_6": "8ce5344cb1e11f31bc507cae4c856083",
        "train_data_batch_7": "32ecc8ad6c55b1c9cb6cf79a2cc46094",
        "train_data_batch_8": "bdeb6da3d05771121992b48c59c69439",
        "train_data_batch_9": "58417149b5ce31688f805341e7f57b4f",
        "train_data_batch_10": "46ad60a1144aaf97a143914453b0dabb",
        "val_data": "06c02b8b4c8de8b3a36b07859a49de6f",
    },
    first=1,
    classes=1000,
)


def cifar10(root: str | Path | None = None, mean_image: bool = False) -> Dataset:
    """Read CIFAR-10: 50,000 training and 10,000 test images in 10 classes.

    Args:
        root: Folder that contains ``cifar-10-batches-py``.
        mean_image: Whether to subtract the mean training image from pixel values of 0 to 1 (RevNet, appendix 7.1), instead of
            normalising each channel by its mean and standard deviation.

    Raises:
        DataError: If ``root`` is None, or a file is missing or damaged.
    """
    return CIFAR10.read(root, mean_image)


def cifar100(root: str | Path | None = None, mean_image: bool = False) -> Dataset:
    """Read CIFAR-100 with its 100 fine classes, from ``root``/cifar-100-python. Arguments and errors as for :func:`cifar10`."""
    return CIFAR100.read(root, mean_image)


def imagenet32(root: str | Path | None = None) -> Dataset:
    """Read ImageNet32: 1,281,167 training and 50,000 validation images in 1000 classes. Needs 4 GB of memory.

    Channels are normalised by their mean and standard deviation over the training images, instead of the ``mean`` image in the
    files.

    Args:
        root: Folder that contains ``train_data_batch_1`` to ``_10`` and ``val_data``.

    Raises:
        DataError: As for :func:`cifar10`.
    """
    return IMAGENET32.read(root)
