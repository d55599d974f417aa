import hashlib
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from petra.data import DATASETS, EvalStream, TrainStream, cifar, load_dataset
from petra.data.streams import augment
from petra.errors import ConfigError, DataError
from petra.reversible import derive_seed


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits")


@pytest.fixture(scope="module")
def numbered():
    """23 training images, each with its own label, so that targets tell which images a microbatch holds."""
    data = load_dataset("synthetic", images=23, classes=5)
    return replace(data, train_labels=torch.arange(23))


# --- data sets ---


def test_digits_have_the_usual_form(digits):
    assert digits.train_images.shape == (1437, 3, 32, 32)
    assert digits.test_images.shape == (360, 3, 32, 32)
    assert digits.train_images.dtype == digits.test_images.dtype == torch.uint8
    assert digits.train_labels.dtype == digits.test_labels.dtype == torch.int64
    assert digits.train_images.amin() == 0
    assert digits.train_images.amax() == 255
    assert torch.equal(digits.train_images[:, 0], digits.train_images[:, 2])
    assert digits.classes == 10
    assert not digits.flip


def test_digits_are_split_evenly_within_each_class(digits):
    train, test = digits.train_labels.bincount(), digits.test_labels.bincount()
    assert ((train + test) / 5 - test).abs().amax() < 1


def test_digits_are_the_same_everywhere(digits):
    content = b"".join(t.numpy().tobytes() for t in (digits.train_images, digits.train_labels, digits.test_images))
    assert hashlib.md5(content).hexdigest() == "65eebc77d919763a76be790be6384328"


def test_synthetic_images_tell_their_class():
    data = load_dataset("synthetic", images=60, classes=3)
    assert (len(data.train_labels), len(data.test_labels), data.classes) == (60, 15, 3)
    centres = torch.stack([data.train_images[data.train_labels == c].float().mean(0) for c in range(3)])
    nearest = torch.cdist(data.test_images.float().flatten(1), centres.flatten(1)).argmin(1)
    assert torch.equal(nearest, data.test_labels)
    assert torch.equal(data.train_images, load_dataset("synthetic", images=60, classes=3).train_images)


def test_normalised_training_images_have_zero_mean_and_unit_deviation(digits):
    for data in (digits, load_dataset("synthetic", images=50)):
        images = data.normalise(data.train_images)
        assert images.dtype == torch.float32
        assert images.mean((0, 2, 3)).abs().amax() < 1e-4
        assert (images.std((0, 2, 3)) - 1).abs().amax() < 1e-3


def test_unknown_names_and_sizes():
    with pytest.raises(ConfigError, match=r"data\.name: found 'mnist', accepted are digits, cifar10, synthetic"):
        load_dataset("mnist")
    with pytest.raises(ConfigError, match=r"data\.images: found 3"):
        load_dataset("synthetic", images=3)
    with pytest.raises(ConfigError, match=r"data\.classes: found 1"):
        load_dataset("synthetic", classes=1)
    assert set(DATASETS) == {"digits", "cifar10", "synthetic"}


# --- CIFAR-10's files ---


def write(folder, name, content, monkeypatch):
    (folder / name).write_bytes(content)
    monkeypatch.setitem(cifar.MD5, name, hashlib.md5(content).hexdigest())


@pytest.fixture(params=["numpy.core", "numpy._core"])
def small_cifar(request, tmp_path, monkeypatch):
    """Files in CIFAR-10's form with four images each, written as by the numpy that spells its core like that."""
    folder = tmp_path / cifar.FOLDER
    folder.mkdir()
    rng = np.random.default_rng(0)
    batches = {}
    for number, name in enumerate(cifar.MD5):
        data = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
        batches[name] = {b"data": data, b"labels": [number, 1, 2, 3]}
        # Protocol 3 keeps bytes as bytes without the helper function that protocol 2 needs.
        content = pickle.dumps(batches[name], protocol=3)
        content = content.replace(b"numpy._core", b"numpy.core").replace(b"numpy.core", request.param.encode())
        write(folder, name, content, monkeypatch)
    return tmp_path, batches


def test_cifar_files_are_read_in_order(small_cifar):
    root, batches = small_cifar
    data = load_dataset("cifar10", root=str(root))
    assert data.train_images.shape == (20, 3, 32, 32)
    assert data.train_images.dtype == torch.uint8
    assert data.train_labels[::4].tolist() == [0, 1, 2, 3, 4]
    assert data.test_labels.tolist() == [5, 1, 2, 3]
    # The file holds 1024 red values, then green, then blue, each row by row.
    flat = batches["data_batch_2"][b"data"][1]
    assert data.train_images[5, 2, 3, 7] == flat[2 * 1024 + 3 * 32 + 7]
    assert data.flip


def test_missing_root():
    with pytest.raises(DataError, match=r"data\.root: not given"):
        load_dataset("cifar10")


def test_missing_file_says_what_to_get_and_where_to_put_it(small_cifar):
    path = small_cifar[0] / cifar.FOLDER / "data_batch_3"
    path.unlink()
    with pytest.raises(DataError) as error:
        load_dataset("cifar10", root=small_cifar[0])
    for part in (str(path), "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", "data.root=", cifar.FOLDER):
        assert part in str(error.value)


def test_damaged_file_is_named_with_both_sums(small_cifar):
    path = small_cifar[0] / cifar.FOLDER / "test_batch"
    content = path.read_bytes()[:-1]
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        load_dataset("cifar10", root=small_cifar[0])
    for part in (str(path), cifar.MD5["test_batch"], hashlib.md5(content).hexdigest()):
        assert part in str(error.value)


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickle_that_calls_a_function_is_refused(small_cifar, monkeypatch):
    root, _ = small_cifar
    write(root / cifar.FOLDER, "data_batch_1", pickle.dumps(Attack(root / "trace")), monkeypatch)
    with pytest.raises(DataError, match=r"data_batch_1: not a CIFAR-10 file \(it asks for (posix|nt)\.mkdir\)"):
        load_dataset("cifar10", root=root)
    assert not (root / "trace").exists()


# --- training stream ---


def test_each_epoch_visits_each_image_once(numbered):
    stream = TrainStream(numbered, batch_size=1, seed=0)
    assert stream.batches_per_epoch == 23
    for epoch in range(3):
        labels = torch.cat([stream.targets(m) for m in range(23 * epoch, 23 * (epoch + 1))])
        assert torch.equal(labels.sort().values, torch.arange(23))


def test_last_incomplete_batch_is_dropped(numbered):
    stream = TrainStream(numbered, batch_size=5, seed=0)
    assert stream.batches_per_epoch == 4
    epochs = [torch.cat([stream.targets(4 * epoch + i) for i in range(4)]) for epoch in range(20)]
    assert all(len(labels.unique()) == 20 for labels in epochs)
    assert len(torch.cat(epochs).unique()) == 23  # other images are left out each time


def test_order_changes_with_epoch_and_seed(numbered):
    def order(seed, epoch):
        stream = TrainStream(numbered, batch_size=23, seed=seed)
        return stream.targets(epoch)

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert not any(torch.equal(a, b) for i, a in enumerate(orders) for b in orders[:i])


def test_microbatches_are_functions_of_their_number(numbered):
    forwards, other = (TrainStream(numbered, batch_size=5, seed=3) for _ in range(2))
    expected = [(forwards.inputs(m), forwards.targets(m)) for m in range(9)]
    for m in (8, 0, 4, 3, 8, 7, 1, 5, 2, 6):
        assert torch.equal(other.targets(m), expected[m][1])
        assert torch.equal(other.inputs(m), expected[m][0])


def test_inputs_belong_to_targets(numbered):
    stream = TrainStream(numbered, batch_size=5, seed=0, augment=False)
    for m in range(6):
        assert torch.equal(stream.inputs(m), numbered.normalise(numbered.train_images[stream.targets(m)]))


def test_the_same_microbatch_is_augmented_differently_in_other_epochs_and_runs():
    one = load_dataset("synthetic", images=4, classes=2)
    one = replace(one, train_images=one.train_images[:1].expand(64, -1, -1, -1), train_labels=torch.zeros(64).long())
    first, later = (TrainStream(one, batch_size=64, seed=0).inputs(m) for m in (0, 1))
    assert not torch.equal(first, later)
    assert not torch.equal(first, TrainStream(one, batch_size=64, seed=1).inputs(0))


def test_stream_flips_only_where_the_data_set_allows_it(numbered):
    flipped, upright, plain = (
        TrainStream(replace(numbered, flip=flip), batch_size=23, seed=0, augment=augmented).inputs(0)
        for flip, augmented in ((True, True), (False, True), (True, False))
    )
    assert not torch.equal(upright, plain)
    mirrored = [torch.equal(image, other.flip(-1)) for image, other in zip(flipped, upright, strict=True)]
    same = [torch.equal(image, other) for image, other in zip(flipped, upright, strict=True)]
    assert [not m for m in mirrored] == same
    assert 0 < sum(mirrored) < 23


def test_augmentation_against_a_search_over_all_crops():
    """Each result must be one of the 81 crops of the padded image or a mirror image of one, and all must occur."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(1, 256, (3, 32, 32), dtype=torch.uint8, generator=generator)
    padded = np.zeros((3, 40, 40), dtype=np.uint8)
    padded[:, 4:36, 4:36] = image.numpy()
    choices = {}
    for top in range(9):
        for left in range(9):
            crop = padded[:, top : top + 32, left : left + 32]
            choices[crop.tobytes()] = (top, left, False)
            choices[crop[:, :, ::-1].tobytes()] = (top, left, True)
    results = augment(image.expand(2000, -1, -1, -1), flip=True, seed=derive_seed(7))
    found = [choices[result.numpy().tobytes()] for result in results]
    assert len(set(found)) == 162
    counts = np.bincount([9 * top + left for top, left, _ in found], minlength=81)
    assert ((counts - 2000 / 81) ** 2).sum() / (2000 / 81) < 130  # chi-square with 80 degrees, 99.9th percentile 125
    assert 0.45 < np.mean([mirrored for *_, mirrored in found]) < 0.55

    unmirrored = augment(image.expand(200, -1, -1, -1), flip=False, seed=1)
    assert not any(choices[result.numpy().tobytes()][2] for result in unmirrored)


def test_augmentation_keeps_images_apart(numbered):
    """Row i of the result is cut from image i, whatever the other images are."""
    images = numbered.train_images.clamp(min=1)  # no zeros but the padding
    for image, result in zip(images, augment(images, flip=False, seed=0), strict=True):
        padded = torch.zeros(3, 40, 40, dtype=torch.uint8)
        padded[:, 4:36, 4:36] = image
        crops = [padded[:, top : top + 32, left : left + 32] for top in range(9) for left in range(9)]
        assert sum(torch.equal(crop, result) for crop in crops) == 1


@pytest.mark.parametrize("batch_size", [0, 24])
def test_batch_size_must_fit_the_training_set(numbered, batch_size):
    with pytest.raises(ConfigError, match=rf"data\.batch_size: found {batch_size}, accepted are 1 to 23"):
        TrainStream(numbered, batch_size, seed=0)


# --- evaluation stream ---


@pytest.mark.parametrize(("batch_size", "batches", "padded"), [(1, 5, 0), (2, 3, 1), (5, 1, 0), (7, 1, 2)])
def test_evaluation_covers_the_test_set_in_full_batches(numbered, batch_size, batches, padded):
    stream = EvalStream(numbered, batch_size)
    assert stream.batches == batches
    inputs = torch.cat([stream.inputs(m) for m in range(batches)])
    targets = torch.cat([stream.targets(m) for m in range(batches)])
    assert inputs.shape == (batches * batch_size, 3, 32, 32)
    assert inputs.dtype == torch.float32
    expected = numbered.normalise(numbered.test_images)
    assert torch.equal(inputs[:5], expected)
    assert torch.equal(targets[:5], numbered.test_labels)
    assert targets[5:].tolist() == [-100] * padded
    assert all(torch.equal(image, expected[-1]) for image in inputs[5:])


def test_empty_evaluation_batch(numbered):
    with pytest.raises(ConfigError, match=r"data\.batch_size: found 0"):
        EvalStream(numbered, 0)
