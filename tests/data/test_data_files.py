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
from petra.data.cifar import CIFAR10, CIFAR100, BinaryFile
from petra.errors import DataError
from tests.support.fakes import cifar_batch, md5, pickled, write_cifar, write_cifar_file, write_imagenet32

RELEASES = pytest.mark.parametrize("release", [CIFAR10, CIFAR100], ids=lambda release: release.name)


# --- CIFAR ---


@RELEASES
@pytest.mark.parametrize("core", ["numpy.core", "numpy._core"])
def test_cifar_files_are_read_in_order(release, core, tmp_path, monkeypatch):
    batches = write_cifar(release, tmp_path, monkeypatch, core)
    data = load_dataset(release.name, root=str(tmp_path))
    files = len(release.train)
    assert (data.train.count, data.test.count, data.classes, data.size) == (4 * files, 4, release.classes, 32)
    images = data.train.inputs.images
    assert images.shape == (4 * files, 3, 32, 32)
    assert images.dtype == torch.uint8
    everything = torch.arange(4 * files)
    assert data.train.targets(everything, None)[::4].tolist() == list(range(files))
    assert data.test.targets(torch.arange(4), None).tolist() == [files, 1, 2, 3]
    assert data.train.targets(everything, None).dtype == torch.int64
    # An image has 1024 red values, then green, then blue, each row by row.
    name = list(release.train)[-1]
    flat = batches[name][b"data"][1]
    assert images[4 * files - 3, 2, 3, 7] == flat[2 * 1024 + 3 * 32 + 7]
    assert data.train.inputs.flip


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


@RELEASES
def test_missing_file_gives_download_instructions(release, tmp_path, monkeypatch):
    write_cifar(release, tmp_path, monkeypatch)
    path = tmp_path / release.folder / list(release.train)[-1]
    path.unlink()
    with pytest.raises(DataError) as error:
        load_dataset(release.name, root=tmp_path)
    for part in (str(path), release.archive, "https://www.cs.toronto.edu/~kriz/cifar.html", "data.root=", release.folder):
        assert part in str(error.value)


def test_damaged_file_is_named_with_both_md5(tmp_path, monkeypatch):
    write_cifar(CIFAR10, tmp_path, monkeypatch)
    path = tmp_path / CIFAR10.folder / "test_batch"
    content = path.read_bytes()[:-1]
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        load_dataset("cifar10", root=tmp_path)
    for part in (str(path), CIFAR10.test["test_batch"], md5(content)):
        assert part in str(error.value)


@pytest.fixture
def binary(tmp_path, monkeypatch):
    """Write a CIFAR-100 of three training images and two test images in the binary format, and return its training images."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 3072), dtype=np.uint8)
    files = {}
    for name, coarse, fine in (("train", [19, 1, 2], [99, 0, 42]), ("test", [7, 8], [5, 6])):
        content = np.column_stack([coarse, fine, images[: len(fine)]]).astype(np.uint8).tobytes()
        (tmp_path / "cifar-100-binary").mkdir(exist_ok=True)
        (tmp_path / "cifar-100-binary" / f"{name}.bin").write_bytes(content)
        files[name] = BinaryFile(f"{name}.bin", len(fine), md5(content))
    release = replace(CIFAR100, binary=replace(CIFAR100.binary, **files))
    monkeypatch.setattr("petra.data.cifar.CIFAR100", release)
    return images


def test_binary_files_have_a_coarse_label_then_a_fine_label_then_the_image(tmp_path, binary):
    data = load_dataset("cifar100", root=tmp_path)
    assert data.train.targets.labels.tolist() == [99, 0, 42]
    assert data.test.targets.labels.tolist() == [5, 6]
    assert np.array_equal(data.train.inputs.images.reshape(3, 3072).numpy(), binary)


def test_binary_and_python_files_give_the_same_data(tmp_path, binary, monkeypatch):
    python = {b"data": binary, b"fine_labels": [99, 0, 42]}
    (tmp_path / "python").mkdir()
    for name in ("train", "test"):
        write_cifar_file(CIFAR100, tmp_path / "python", name, pickled(python), monkeypatch)
    first, second = (load_dataset("cifar100", root=root).train for root in (tmp_path, tmp_path / "python"))
    assert torch.equal(first.inputs.images, second.inputs.images)
    assert torch.equal(first.targets.labels, second.targets.labels)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[:-1], r"expected a file of 9222 bytes, got one of 9221"),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), r"expected a file with md5 \w+, got one with md5 \w+"),
    ],
)
def test_damaged_binary_file(tmp_path, binary, change, reason):
    path = tmp_path / "cifar-100-binary" / "train.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=rf"train\.bin: {reason}, which is damaged; .*cifar-100-binary\.tar\.gz"):
        load_dataset("cifar100", root=tmp_path)


def test_the_published_sizes_of_the_binary_files():
    """The sizes follow from the format: 50,000 and 10,000 rows of two labels and 3072 pixels."""
    assert (CIFAR100.binary.train.size, CIFAR100.binary.test.size) == (153_700_000, 30_740_000)


@RELEASES
def test_the_mean_image_is_subtracted_before_the_crop(release, tmp_path, monkeypatch):
    write_cifar(release, tmp_path, monkeypatch)
    plain, centred = (load_dataset(release.name, root=tmp_path, mean_image=value) for value in (False, True))
    everything = torch.arange(plain.train.count)
    pixels = plain.train.inputs.images.double()
    expected = (pixels - pixels.mean(0)) / 255
    assert torch.allclose(centred.train.inputs(everything, None).double(), expected, atol=1e-6)
    assert torch.allclose(centred.train.inputs(everything, None).mean(0), torch.zeros(3, 32, 32), atol=1e-6)
    # The padding of a crop is zero, the value of the mean image, and the crops are those of the other normalisation.
    first, second = centred.train.inputs(everything, 5), augment(expected.float(), True, 5, everything)
    assert torch.allclose(first, second, atol=1e-6)
    test = plain.test.inputs.images.double()
    assert torch.allclose(centred.test.inputs(torch.arange(4), None).double(), (test - pixels.mean(0)) / 255, atol=1e-6)


@RELEASES
@pytest.mark.parametrize("mean_image", [False, True])
def test_an_image_file_is_prepared_as_the_test_images_are(release, mean_image, tmp_path, monkeypatch):
    write_cifar(release, tmp_path, monkeypatch)
    data = load_dataset(release.name, root=tmp_path, mean_image=mean_image)
    Image.fromarray(data.test.inputs.images[1].permute(1, 2, 0).numpy()).save(tmp_path / "1.png")
    prepare = Preparation.from_dict(json.loads(json.dumps(data.preparation.as_dict())))
    assert torch.equal(prepare(tmp_path / "1.png"), data.test.inputs(torch.tensor([1]), None))


@RELEASES
def test_classes_have_the_names_that_the_files_give_them(release, tmp_path, monkeypatch):
    write_cifar(release, tmp_path, monkeypatch)
    assert load_dataset(release.name, root=tmp_path).preparation.classes == ()
    file, key = release.names
    (tmp_path / release.folder / file).write_bytes(pickled({key.encode(): [b"airplane", b"bird"]}))
    assert load_dataset(release.name, root=tmp_path).preparation.classes == ("airplane", "bird")


def test_binary_files_name_a_class_in_each_line(tmp_path, binary):
    (tmp_path / "cifar-100-binary" / "fine_label_names.txt").write_text("apple\naquarium_fish\n")
    assert load_dataset("cifar100", root=tmp_path).preparation.classes == ("apple", "aquarium_fish")


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickle_that_calls_a_function_is_refused(tmp_path, monkeypatch):
    write_cifar(CIFAR10, tmp_path, monkeypatch)
    write_cifar_file(CIFAR10, tmp_path, "data_batch_1", pickle.dumps(Attack(tmp_path / "trace")), monkeypatch)
    with pytest.raises(DataError, match=r"data_batch_1: can't be read as a file of images \((posix|nt)\.mkdir is not allowed\)"):
        load_dataset("cifar10", root=tmp_path)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"data": np.zeros((4, 3071), np.uint8)}, r"data: expected uint8\[N, 3072\], got uint8\[4, 3071\]"),
        ({b"data": np.zeros((4, 3072), np.float32)}, r"data: expected uint8\[N, 3072\], got float32\[4, 3072\]"),
        ({b"data": np.zeros((0, 3072), np.uint8), b"labels": []}, r"data: expected uint8\[N, 3072\], got uint8\[0, 3072\]"),
        ({b"data": np.zeros((4, 3072), complex)}, r"unsupported array type <c16"),
        ({b"labels": [0, 1, 2]}, r"labels: expected integers\[4\], got int64\[3\]"),
        ({b"labels": [0, 1, 2, 10]}, r"labels: expected integers from 0 to 9, got integers from 0 to 10"),
        ({b"labels": [0, 1, 2, -1]}, r"labels: expected integers from 0 to 9, got integers from -1 to 2"),
        ({b"labels": [0, 1, 2, 2.5]}, r"labels: expected integers\[4\], got float64\[4\]"),
        ({b"labels": None}, r"labels: expected integers\[4\], got object\[\]"),
        ({b"labels": ...}, r"builtins.Ellipsis is not allowed"),
    ],
)
def test_file_with_correct_md5_and_invalid_content(change, message, tmp_path, monkeypatch):
    write_cifar(CIFAR10, tmp_path, monkeypatch)
    content = pickled(cifar_batch(1, "labels") | change)
    write_cifar_file(CIFAR10, tmp_path, "data_batch_2", content, monkeypatch)
    with pytest.raises(DataError, match=rf"data_batch_2: can't be read as a file of images \({message}"):
        load_dataset("cifar10", root=tmp_path)


def test_file_without_labels(tmp_path, monkeypatch):
    write_cifar(CIFAR10, tmp_path, monkeypatch)
    write_cifar_file(CIFAR10, tmp_path, "data_batch_2", pickled({b"data": np.zeros((1, 3072), np.uint8)}), monkeypatch)
    with pytest.raises(DataError, match=r"data_batch_2: can't be read as a file of images \(no 'labels'\)"):
        load_dataset("cifar10", root=tmp_path)


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
    write_imagenet32(tmp_path, monkeypatch, zipped=True)
    path = tmp_path / "train_data_batch_7.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"batch_7\.npz: can't be read as a file of images \(Bad CRC-32 for file 'data\.npy'\)"):
        load_dataset("imagenet32", root=tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"train_data_batch_7: can't be read .*download Imagenet32_train\.zip .*set data\.root"):
        load_dataset("imagenet32", root=tmp_path)


def test_imagenet32_pickle_is_checked_by_its_md5(tmp_path, monkeypatch):
    write_imagenet32(tmp_path, monkeypatch, zipped=False)
    monkeypatch.setitem(imagenet32.MD5, "val_data", "0" * 32)
    with pytest.raises(DataError, match=r"val_data: expected a file with md5 0{32}, got one with md5 \w{32}, which is damaged"):
        load_dataset("imagenet32", root=tmp_path)


def test_npz_file_with_objects_is_refused(tmp_path, monkeypatch):
    """Arrays of objects are pickles, which can run code."""
    write_imagenet32(tmp_path, monkeypatch, zipped=True)
    np.savez(tmp_path / "val_data.npz", data=np.array([Attack(tmp_path / "trace")]), labels=np.array([1]))
    with pytest.raises(DataError, match=r"val_data\.npz: can't be read as a file of images \(Object arrays cannot be loaded"):
        load_dataset("imagenet32", root=tmp_path)
    assert not (tmp_path / "trace").exists()
