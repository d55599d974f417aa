"""CIFAR-10, CIFAR-100 and ImageNet32, read from small files in the original formats."""

import json
import os
import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from PIL import Image

from petra.data import Preparation, load_dataset, releases
from petra.data.arrays import augment
from petra.data.releases import CIFAR10, CIFAR100, IMAGENET32
from petra.errors import DataError
from tests.support.fakes import md5, pickled, write_pickle, write_release


@pytest.mark.parametrize(("release", "core"), [(CIFAR10, "numpy.core"), (CIFAR100, "numpy._core"), (IMAGENET32, "numpy.core")])
def test_images_and_labels_are_those_of_the_files_in_order(release, core, tmp_path, monkeypatch):
    """ImageNet32's moments are those of the training images. Classes have names if the file is there."""
    batches = write_release(release, tmp_path, monkeypatch, core)
    data, files = load_dataset(release.name, root=str(tmp_path)), len(release.files) - 1
    assert (data.train.count, data.test.count, data.classes, data.size) == (4 * files, 4, release.classes, 32)
    images, labels = data.train.inputs.images, data.train.targets(torch.arange(4 * files), None)
    assert (images.shape, images.dtype, data.train.inputs.flip) == ((4 * files, 3, 32, 32), torch.uint8, True)
    assert (labels.tolist(), labels.dtype) == ([label for i in range(files) for label in (i, 1, 2, 3)], torch.int64)
    assert data.test.targets(torch.arange(4), None).tolist() == [files, 1, 2, 3]
    # An image has 1024 red values, then green, then blue, each row by row.
    assert images[4 * files - 3, 2, 3, 7] == batches[list(release.files)[-2]][b"data"][1][2 * 1024 + 3 * 32 + 7]
    if release is IMAGENET32:
        std, mean = torch.std_mean(images.double() / 255, (0, 2, 3), correction=0)
        assert torch.allclose(torch.tensor(data.preparation.moments).double(), torch.stack([mean, std]))
        return
    assert data.preparation.classes == ()
    file, key, expected = release.names
    content = pickled({key.encode(): [b"airplane", b"bird"]})
    (tmp_path / release.folder / file).write_bytes(content)
    with pytest.raises(DataError, match=rf"{file}: expected a file with md5 {expected}, got .*, which is damaged"):
        load_dataset(release.name, root=tmp_path)
    monkeypatch.setattr(releases, release.name.upper(), replace(release, names=(file, key, md5(content))))
    assert load_dataset(release.name, root=tmp_path).preparation.classes == ("airplane", "bird")


def test_both_normalisations_and_the_preparation_of_an_image_file(tmp_path, monkeypatch):
    write_release(CIFAR10, tmp_path, monkeypatch)
    data, centred = (load_dataset("cifar10", root=tmp_path, mean_image=value) for value in (False, True))
    everything, pixels = torch.arange(20), data.train.inputs.images.double()
    expected = (pixels - pixels.mean(0)) / 255
    assert torch.allclose(centred.train.inputs(everything, None).double(), expected, atol=1e-6)
    # The padding of a crop is zero, the value of the mean image, and the crops are those of the other normalisation.
    assert torch.allclose(centred.train.inputs(everything, 5), augment(expected.float(), True, 5, everything), atol=1e-6)
    Image.fromarray(data.test.inputs.images[1].permute(1, 2, 0).numpy()).save(tmp_path / "1.png")
    for found in (data, centred):
        prepare = Preparation.from_dict(json.loads(json.dumps(asdict(found.preparation))))
        assert torch.equal(prepare(tmp_path / "1.png"), found.test.inputs(torch.tensor([1]), None))


def test_a_pickle_of_python_2(tmp_path, monkeypatch):
    """The original files have protocol 2, in which text is bytes. Python 3 can't write such pickles of numpy arrays."""
    write_release(CIFAR10, tmp_path, monkeypatch)
    images = np.arange(3072, dtype=np.uint8)
    content = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T\x00\x0c\x00\x00" + images.tobytes() + b"tbU\x06labelsq\x08]q\x09K\x07au."
    )
    assert np.array_equal(pickle.loads(content, encoding="bytes")[b"data"][0], images)
    write_pickle(CIFAR10, tmp_path, "test_batch", content, monkeypatch)
    data = load_dataset("cifar10", root=tmp_path)
    assert data.test.targets(torch.arange(1), None).tolist() == [7]
    assert np.array_equal(data.test.inputs.images.flatten().numpy(), images)


@pytest.mark.parametrize("release", [CIFAR100, IMAGENET32])
def test_a_file_that_is_missing_or_damaged_is_named_with_instructions(release, tmp_path, monkeypatch):
    write_release(release, tmp_path, monkeypatch)
    name = list(release.files)[-1]
    path = tmp_path / release.folder / name
    content = path.read_bytes()[:-1]
    for change, parts in ((lambda: path.write_bytes(content), (release.files[name], md5(content))), (path.unlink, ())):
        change()
        with pytest.raises(DataError) as error:
            load_dataset(release.name, root=tmp_path)
        for part in (str(path), release.help, *parts):
            assert part in str(error.value)
    assert "data.root" in release.help


def test_a_pickle_that_would_call_a_function_is_refused(tmp_path, monkeypatch):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trace"),)

    write_release(CIFAR10, tmp_path, monkeypatch)
    write_pickle(CIFAR10, tmp_path, "data_batch_2", pickle.dumps(Attack()), monkeypatch)
    with pytest.raises(
        DataError, match=r"data_batch_2: expected a pickle of plain containers and arrays, got one with posix\.mkdir"
    ):
        load_dataset("cifar10", root=tmp_path)
    assert not (tmp_path / "trace").exists()
