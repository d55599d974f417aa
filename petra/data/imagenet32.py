"""ImageNet at 32x32 pixels (Chrabaszcz et al. 2017, "A downsampled variant of ImageNet as an alternative to CIFAR")."""

from __future__ import annotations

from pathlib import Path

from petra.data.arrays import array_dataset, channel_moments
from petra.data.dataset import Dataset
from petra.data.files import Batch, folder_of, joined, read_images

MD5 = {
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
}
"""md5 of the pickle files. The npz files contain checksums."""
HELP = (
    "download Imagenet32_train.zip and Imagenet32_val.zip, or the same with _npz, from https://image-net.org/download-images "
    "(downsampled image data, 32x32), unpack both into one folder, and set data.root to it"
)
CLASSES = 1000


def imagenet32(root: str | Path | None = None) -> Dataset:
    """Read ImageNet32: 1,281,167 training and 50,000 validation images. Needs 4 GB of memory.

    Each of the eleven files is either the pickle, which is checked by its md5, or the npz variant. Labels 1 ... 1000 become
    0 ... 999. Channels are normalised by their mean and standard deviation over the training images, instead of the ``mean`` image
    in the files.

    Args:
        root: Folder of the files.

    Raises:
        DataError: If ``root`` is None, or a file is missing or damaged.
    """
    folder = folder_of(root, "imagenet32", HELP)
    *train_files, test_file = MD5
    train, test = (joined(_batch(folder, name) for name in names) for names in (train_files, [test_file]))
    return array_dataset("imagenet32", CLASSES, train, test, moments=channel_moments(train[0]), flip=True)


def _batch(folder: Path, name: str) -> Batch:
    path, zipped = folder / name, folder / f"{name}.npz"
    chosen, md5 = (zipped, None) if zipped.exists() and not path.exists() else (path, MD5[name])
    return read_images(chosen, "labels", range(1, CLASSES + 1), HELP, md5)
