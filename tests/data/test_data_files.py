"""CIFAR-10, CIFAR-100 and ImageNet32, read from small files in the original formats."""

import json
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from petra.data import Preparation, TrainSource, imagenet32, load_dataset
from petra.data.arrays import augment
from petra.data.cifar import CIFAR10, CIFAR100, CIFAR100_BINARY
from petra.errors import DataError
from tests.support.fakes import cifar_batch, md5, pickled, write_cifar, write_cifar_file, write_imagenet32

# --- CIFAR ---


@pytest.mark.parametrize(("release", "core"), [(CIFAR10, "numpy.core"), (CIFAR100, "numpy._core")], ids=["cifar10", "cifar100"])
def test_cifar(release, core, tmp_path, monkeypatch):
    """Order, form, names of classes, both normalisations, and the preparation of an image file."""
    batches = write_cifar(release, tmp_path, monkeypatch, core)
    data, files = load_dataset(release.name, root=str(tmp_path)), len(release.train)
    assert (data.train.count, data.test.count, data.classes, data.size) == (4 * files, 4, release.classes, 32)
    images, everything = data.train.inputs.images, torch.arange(4 * files)
    assert (images.shape, images.dtype) == ((4 * files, 3, 32, 32), torch.uint8)
    labels = data.train.targets(everything, None)
    assert (labels[::4].tolist(), labels.dtype) == (list(range(files)), torch.int64)
    assert data.test.targets(torch.arange(4), None).tolist() == [files, 1, 2, 3]
    # An image has 1024 red values, then green, then blue, each row by row.
    assert images[4 * files - 3, 2, 3, 7] == batches[list(release.train)[-1]][b"data"][1][2 * 1024 + 3 * 32 + 7]
    assert data.train.inputs.flip
    assert data.preparation.classes == ()

    file, key = release.names
    (tmp_path / release.folder / file).write_bytes(pickled({key.encode(): [b"airplane", b"bird"]}))
    centred, pixels, test = load_dataset(release.name, root=tmp_path, mean_image=True), images.double(), torch.arange(4)
    assert centred.preparation.classes == ("airplane", "bird")
    expected = (pixels - pixels.mean(0)) / 255
    assert torch.allclose(centred.train.inputs(everything, None).double(), expected, atol=1e-6)
    # The padding of a crop is zero, the value of the mean image, and the crops are those of the other normalisation.
    assert torch.allclose(centred.train.inputs(everything, 5), augment(expected.float(), True, 5, everything), atol=1e-6)
    tested = (data.test.inputs.images.double() - pixels.mean(0)) / 255
    assert torch.allclose(centred.test.inputs(test, None).double(), tested, atol=1e-6)

    Image.fromarray(data.test.inputs.images[1].permute(1, 2, 0).numpy()).save(tmp_path / "1.png")
    for found in (data, centred):
        prepare = Preparation.from_dict(json.loads(json.dumps(found.preparation.as_dict())))
        assert torch.equal(prepare(tmp_path / "1.png"), found.test.inputs(torch.tensor([1]), None))


def test_a_pickle_of_python_2(tmp_path, monkeypatch):
    """The original files have protocol 2, in which text is bytes. Python 3 can't write such pickles of numpy arrays."""
    write_cifar(CIFAR10, tmp_path, monkeypatch)
    images = np.arange(3072, dtype=np.uint8)
    content = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T\x00\x0c\x00\x00" + images.tobytes() + b"tbU\x06labelsq\x08]q\x09K\x07au."
    )
    assert np.array_equal(pickle.loads(content, encoding="bytes")[b"data"][0], images)
    write_cifar_file(CIFAR10, tmp_path, "test_batch", content, monkeypatch)
    data = load_dataset("cifar10", root=tmp_path)
    assert data.test.targets.labels.tolist() == [7]
    assert np.array_equal(data.test.inputs.images.flatten().numpy(), images)


def test_a_file_that_is_missing_or_damaged_is_named_with_instructions(tmp_path, monkeypatch):
    write_cifar(CIFAR100, tmp_path, monkeypatch)
    path = tmp_path / CIFAR100.folder / "test"
    content = path.read_bytes()[:-1]
    for change, parts in ((lambda: path.write_bytes(content), (CIFAR100.test["test"], md5(content))), (path.unlink, ())):
        change()
        with pytest.raises(DataError) as error:
            load_dataset("cifar100", root=tmp_path)
        for part in (str(path), CIFAR100.archive, "https://www.cs.toronto.edu/~kriz/cifar.html", "data.root=", *parts):
            assert part in str(error.value)


def test_binary_files_have_a_coarse_label_then_a_fine_label_then_the_image(tmp_path, monkeypatch):
    """And the same content as the pickles, names of classes in a text file, and an md5 that is checked."""
    images = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    folder, sums = tmp_path / CIFAR100_BINARY.folder, {}
    folder.mkdir()
    (folder / "fine_label_names.txt").write_text("apple\naquarium_fish\n")
    for name, coarse, fine in (("train.bin", [19, 1, 2], [99, 0, 42]), ("test.bin", [7, 8], [5, 6])):
        content = np.column_stack([coarse, fine, images[: len(fine)]]).astype(np.uint8).tobytes()
        (folder / name).write_bytes(content)
        sums[name] = md5(content)
    train, test = ({name: sums[name]} for name in sums)
    monkeypatch.setattr("petra.data.cifar.CIFAR100_BINARY", replace(CIFAR100_BINARY, train=train, test=test))
    data = load_dataset("cifar100", root=tmp_path)
    assert data.train.targets.labels.tolist() == [99, 0, 42]
    assert data.test.targets.labels.tolist() == [5, 6]
    assert np.array_equal(data.train.inputs.images.reshape(3, 3072).numpy(), images)
    assert data.preparation.classes == ("apple", "aquarium_fish")
    (folder / "train.bin").write_bytes(content)
    with pytest.raises(
        DataError, match=r"train\.bin: expected a file with md5 \w+, got .*, which is damaged; .*cifar-100-binary\.tar\.gz"
    ):
        load_dataset("cifar100", root=tmp_path)


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"data": np.zeros((4, 3071), np.uint8)}, r"data: expected uint8\[N, 3072\], got uint8\[4, 3071\]"),
        ({b"data": np.zeros((0, 3072), np.uint8), b"labels": []}, r"data: expected uint8\[N, 3072\], got uint8\[0, 3072\]"),
        ({b"labels": [0, 1, 2]}, r"labels: expected integers\[4\], got int64\[3\]"),
        ({b"labels": [0, 1, 2, 10]}, r"labels: expected integers from 0 to 9, got integers from 0 to 10"),
        ({b"labels": ...}, r"builtins.Ellipsis is not allowed"),
        (None, r"no 'labels'"),
        (Attack, r"(posix|nt)\.mkdir is not allowed"),
    ],
)
def test_file_with_correct_md5_and_invalid_content(change, message, tmp_path, monkeypatch):
    """A pickle that would call a function is refused."""
    write_cifar(CIFAR10, tmp_path, monkeypatch)
    content = {b"data": np.zeros((1, 3072), np.uint8)} if change is None else cifar_batch(1, "labels")
    content = pickle.dumps(Attack(tmp_path / "trace")) if change is Attack else pickled(content | (change or {}))
    write_cifar_file(CIFAR10, tmp_path, "data_batch_2", content, monkeypatch)
    with pytest.raises(DataError, match=rf"data_batch_2: can't be read as a file of images \({message}"):
        load_dataset("cifar10", root=tmp_path)
    assert not (tmp_path / "trace").exists()


# --- ImageNet32 ---


@pytest.mark.parametrize("zipped", [False, True], ids=["pickle", "npz"])
def test_imagenet32_files_are_read_in_order(zipped, tmp_path, monkeypatch):
    batches = write_imagenet32(tmp_path, monkeypatch, zipped)
    data = load_dataset("imagenet32", root=tmp_path)
    assert (data.train.count, data.test.count, data.classes, data.size) == (30, 3, 1000, 32)
    # File number i has the labels i + 1, 1000 and 1. Files are read in the order of their numbers, not of their names.
    assert data.train.targets.labels.tolist() == [label for i in range(10) for label in (i, 999, 0)]
    assert data.test.targets.labels.tolist() == [10, 999, 0]
    expected = np.concatenate([batch["data"] for batch in batches.values()]).reshape(-1, 3, 32, 32)
    assert np.array_equal(data.train.inputs.images.numpy(), expected[:30])
    assert np.array_equal(data.test.inputs.images.numpy(), expected[30:])
    mean, std = (torch.tensor(values) for values in data.train.inputs.moments)
    assert torch.allclose(mean, torch.tensor(expected[:30] / 255).mean((0, 2, 3)).float())
    assert torch.allclose(std, torch.tensor(expected[:30] / 255).std((0, 2, 3), correction=0).float())
    assert TrainSource(data, 4, seed=0).inputs(0).shape == (4, 3, 32, 32)


def test_imagenet32_file_that_is_missing_or_damaged(tmp_path, monkeypatch):
    """Arrays of objects are pickles, which can run code. The md5 of a pickle and the checksums in an npz file are verified."""
    write_imagenet32(tmp_path, monkeypatch, zipped=True)

    def refused(message):
        with pytest.raises(DataError, match=message):
            load_dataset("imagenet32", root=tmp_path)

    np.savez(tmp_path / "val_data.npz", data=np.array([Attack(tmp_path / "trace")]), labels=np.array([1]))
    refused(r"val_data\.npz: can't be read as a file of images \(Object arrays cannot be loaded")
    assert not (tmp_path / "trace").exists()
    path = tmp_path / "train_data_batch_7.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)
    refused(r"batch_7\.npz: can't be read as a file of images \(Bad CRC-32 for file 'data\.npy'\)")
    path.unlink()
    refused(r"train_data_batch_7: can't be read .*download Imagenet32_train\.zip .*set data\.root")
    write_imagenet32(tmp_path, monkeypatch, zipped=False)
    monkeypatch.setitem(imagenet32.MD5, "val_data", "0" * 32)
    refused(r"val_data: expected a file with md5 0{32}, got one with md5 \w{32}, which is damaged")
