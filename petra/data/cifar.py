"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009, "Learning multiple layers of features from tiny images"), from the original files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from petra.data.arrays import array_dataset
from petra.data.dataset import Dataset
from petra.data.files import IMAGE_BYTES, Batch, as_batch, folder_of, joined, read_checked, unpickled
from petra.data.preparation import Moments


@dataclass(frozen=True)
class BinaryFile:
    """A file without a header. A row holds one byte per label, the last of which is used, then the bytes of the image.

    Attributes:
        name: Name of the file.
        rows: Number of images.
        md5: Checksum of the file.
        labels: Number of labels of an image.
    """

    name: str
    rows: int
    md5: str
    labels: int = 2

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.rows * (self.labels + IMAGE_BYTES)

    def read(self, folder: Path, classes: int, help: str) -> Batch:
        """Return the images and labels of the file in ``folder``. Raises DataError if it is missing or damaged."""
        path = folder / self.name
        rows = np.frombuffer(read_checked(path, self.md5, help, self.size), np.uint8).reshape(self.rows, -1)
        content = {"data": rows[:, self.labels :], "labels": rows[:, self.labels - 1]}
        return as_batch(path, content, "labels", range(classes), help)


@dataclass(frozen=True)
class BinaryRelease:
    """The binary version of a data set.

    Attributes:
        folder: Folder of the files in the archive.
        archive: Name and md5 of the archive.
        train, test: The files.
        names: File with the name of a class in each line. If it is missing, classes have no names.
    """

    folder: str
    archive: str
    train: BinaryFile
    test: BinaryFile
    names: str


@dataclass(frozen=True)
class Release:
    """Files and constants of one of the two data sets.

    Attributes:
        name: Name of the data set.
        folder: Folder of the files in the archive.
        archive: Name and md5 of the archive.
        train, test: md5 of each file by file name.
        labels: Key of the labels in a file.
        names: File with the names of the classes, and their key. If it is missing, classes have no names.
        classes: Number of classes.
        moments: Mean and standard deviation of each channel.
        binary: The binary version. It is read if the Python version is missing.
    """

    name: str
    folder: str
    archive: str
    train: dict[str, str]
    test: dict[str, str]
    labels: str
    names: tuple[str, str]
    classes: int
    moments: Moments
    binary: BinaryRelease | None = None

    @property
    def help(self) -> str:
        """Instructions for download, for error messages."""
        archives, folders = self.archive, self.folder
        if self.binary is not None:
            archives, folders = f"{archives} or {self.binary.archive}", f"{folders} or {self.binary.folder}"
        return (
            f"download {archives} from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it, "
            f"and set data.root=<folder that contains {folders}>"
        )

    def read(self, root: str | Path | None, mean_image: bool = False) -> Dataset:
        """Read all files in ``root``/``folder``, or else those of the binary version, after checking their md5."""
        top = folder_of(root, self.name, self.help)
        folder, binary = top / self.folder, self.binary
        if binary is not None and not folder.is_dir() and (top / binary.folder).is_dir():
            files = (binary.train, binary.test)
            train, test = (joined([file.read(top / binary.folder, self.classes, self.help)]) for file in files)
            names = class_names(top / binary.folder / binary.names)
        else:
            train, test = (
                joined(self._batch(folder / name, md5) for name, md5 in files.items()) for files in (self.train, self.test)
            )
            names = class_names(folder / self.names[0], self.names[1])
        return array_dataset(
            self.name, self.classes, train, test, moments=self.moments, flip=True, mean_image=mean_image, names=names
        )

    def _batch(self, path: Path, md5: str) -> Batch:
        content = unpickled(path, read_checked(path, md5, self.help), self.help)
        return as_batch(path, content, self.labels, range(self.classes), self.help)


def class_names(path: Path, key: str | None = None) -> tuple[str, ...]:
    """Return the names of the classes in a file, or none if the file is missing.

    Args:
        path: A text file with a name in each line, or a pickle.
        key: Key of the names in the pickle. None for a text file.

    Raises:
        DataError: If the pickle is damaged.
    """
    if not path.exists():
        return ()
    content, help = path.read_bytes(), "replace or remove the file"
    names = content.decode().split() if key is None else unpickled(path, content, help).get(key, ())
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


CIFAR10 = Release(
    name="cifar10",
    folder="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz (md5 c58f30108f718f92721af3b95e74349a)",
    train={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    test={"test_batch": "40351d587109b95175f43aff81a1287e"},
    labels="labels",
    names=("batches.meta", "label_names"),
    classes=10,
    moments=((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
)
CIFAR100 = Release(
    name="cifar100",
    folder="cifar-100-python",
    archive="cifar-100-python.tar.gz (md5 eb9058c3a382ffc7106e4002c42a8d85)",
    train={"train": "16019d7e3df5f24257cddd939b257f8d"},
    test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    labels="fine_labels",
    names=("meta", "fine_label_names"),
    classes=100,
    moments=((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    binary=BinaryRelease(
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz (md5 03b5dce01913d631647c71ecec9e9cb8)",
        train=BinaryFile("train.bin", 50_000, "6172c7755cfe09b2fe270c85cebc1b15"),
        test=BinaryFile("test.bin", 10_000, "4499cfba6c016c1be1438163640a0898"),
        names="fine_label_names.txt",
    ),
)


def cifar10(root: str | Path | None = None, mean_image: bool = False) -> Dataset:
    """Read CIFAR-10: 50,000 training and 10,000 test images of 32x32 pixels in 10 classes.

    Args:
        root: Folder that contains ``cifar-10-batches-py``.
        mean_image: Whether to subtract the mean training image from pixel values of 0 to 1 (RevNet, appendix 7.1), instead of
            normalising each channel by its mean and standard deviation.

    Raises:
        DataError: If ``root`` is None, or a file is missing or damaged. Each file is checked by its md5.
    """
    return CIFAR10.read(root, mean_image)


def cifar100(root: str | Path | None = None, mean_image: bool = False) -> Dataset:
    """Read CIFAR-100 with its 100 fine classes.

    As :func:`cifar10`, with files in ``root``/cifar-100-python, or if there is no such folder in ``root``/cifar-100-binary.
    """
    return CIFAR100.read(root, mean_image)
