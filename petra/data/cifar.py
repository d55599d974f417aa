"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009, "Learning multiple layers of features from tiny images"), from the original files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from petra.data.arrays import array_dataset
from petra.data.dataset import Dataset
from petra.data.files import folder_of, joined, read_images, unpickled
from petra.data.preparation import Moments
from petra.errors import DataError, first_line


@dataclass(frozen=True)
class Release:
    """A data set in one of the formats in which it is published.

    Attributes:
        name: Name of the data set.
        folder: Folder of the files in the archive.
        archive: Name and md5 of the archive.
        train, test: md5 of each file by file name. Names of binary files end with ``.bin``.
        labels: Key of the labels in a pickle.
        names: File with the names of the classes, and their key in a pickle; None for a text file with a name in each line. If the
            file is missing, classes have no names.
        classes: Number of classes.
        moments: Mean and standard deviation of each channel.
    """

    name: str
    folder: str
    archive: str
    train: dict[str, str]
    test: dict[str, str]
    labels: str
    names: tuple[str, str | None]
    classes: int
    moments: Moments

    def class_names(self, folder: Path) -> tuple[str, ...]:
        """Return the names of the classes, or none if the file is missing. Raises DataError if it is damaged."""
        file, key = self.names
        path = folder / file
        if not path.exists():
            return ()
        try:
            names = path.read_text(encoding="utf-8").split() if key is None else unpickled(path.read_bytes())[key]
            return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
        except Exception as error:  # a damaged pickle can raise any exception
            raise DataError(
                f"{path}: can't be read as names of classes ({first_line(error)}); replace or remove the file"
            ) from error


def read_release(root: str | Path | None, mean_image: bool, *releases: Release) -> Dataset:
    """Read all files in ``root``/``folder``, after checking their md5: those of the first release that has a folder there."""
    release = releases[0]
    archives, folders = (" or ".join(getattr(r, key) for r in releases) for key in ("archive", "folder"))
    help = (
        f"download {archives} from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it, "
        f"and set data.root=<folder that contains {folders}>"
    )
    top = folder_of(root, release.name, help)
    release = next((r for r in releases if (top / r.folder).is_dir()), release)
    folder, labels = top / release.folder, range(release.classes)
    train, test = (
        joined(read_images(folder / file, release.labels, labels, help, md5) for file, md5 in files.items())
        for files in (release.train, release.test)
    )
    return array_dataset(
        release.name,
        release.classes,
        train,
        test,
        moments=release.moments,
        flip=True,
        mean_image=mean_image,
        names=release.class_names(folder),
    )


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
)
CIFAR100_BINARY = replace(
    CIFAR100,
    folder="cifar-100-binary",
    archive="cifar-100-binary.tar.gz (md5 03b5dce01913d631647c71ecec9e9cb8)",
    train={"train.bin": "6172c7755cfe09b2fe270c85cebc1b15"},
    test={"test.bin": "4499cfba6c016c1be1438163640a0898"},
    names=("fine_label_names.txt", None),
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
    return read_release(root, mean_image, CIFAR10)


def cifar100(root: str | Path | None = None, mean_image: bool = False) -> Dataset:
    """Read CIFAR-100 with its 100 fine classes.

    As :func:`cifar10`, with files in ``root``/cifar-100-python, or if there is no such folder in ``root``/cifar-100-binary.
    """
    return read_release(root, mean_image, CIFAR100, CIFAR100_BINARY)
