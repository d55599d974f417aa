"""Data sets without files, text, and invalid settings of all data sets."""

import hashlib

import pytest
import torch

from petra.data import DECODED, EvalSource, TrainSource, from_dataset, load_dataset, microbatch_form
from petra.errors import ConfigError, DataError
from tests.support.fakes import write_image_folders


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits")


def test_digits_are_the_same_everywhere(digits):
    """They have the usual form, and are split evenly within each class."""
    train, test = digits.train.inputs.images, digits.test.inputs.images
    assert (train.shape, test.shape, digits.classes, digits.size) == ((1437, 3, 32, 32), (360, 3, 32, 32), 10, 32)
    assert not digits.train.inputs.flip
    labels = [split.targets(torch.arange(split.count), None) for split in (digits.train, digits.test)]
    counts = [found.bincount() for found in labels]
    assert (sum(counts) / 5 - counts[1]).abs().amax() < 1
    content = b"".join(t.numpy().tobytes() for t in (train, labels[0], test))
    assert hashlib.md5(content).hexdigest() == "65eebc77d919763a76be790be6384328"


@pytest.mark.parametrize("size", [32, 13])
def test_synthetic_images_can_be_classified(size):
    data = load_dataset("synthetic", images=60, classes=3, size=size)
    assert (data.train.count, data.test.count, data.classes, data.size) == (60, 15, 3, size)
    images, labels = data.train.inputs.images, data.train.targets(torch.arange(60), None)
    assert images.shape == (60, 3, size, size)
    centres = torch.stack([images[labels == c].float().mean(0) for c in range(3)])
    nearest = torch.cdist(data.test.inputs.images.float().flatten(1), centres.flatten(1)).argmin(1)
    assert torch.equal(nearest, data.test.targets(torch.arange(15), None))
    assert (centres - centres.flip(-1)).abs().amax() < 65  # symmetric except for the noise
    assert torch.equal(images, load_dataset("synthetic", images=60, classes=3, size=size).train.inputs.images)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mnist", {}, r"^name: expected digits, synthetic, cifar10, .* tokens.*, got mnist"),
        ("synthetic", {"images": 3}, r"data\.images: expected an integer >= 4, got 3"),
        ("text", {"validation": 1.0}, r"data\.validation: expected a number > 0 and < 1, got 1\.0"),
    ],
)
def test_invalid_names_and_settings(name, options, message):
    with pytest.raises(ConfigError, match=message):
        load_dataset(name, **options)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "imagenet32", "imagenet", "text"])
def test_data_sets_of_files_need_a_root(name):
    with pytest.raises(DataError, match=rf"data\.root: expected a path to the files of {name}, got none; .*data\.root"):
        load_dataset(name)


def test_microbatches_have_the_predicted_shape_and_type(tmp_path):
    (tmp_path / "t").write_text("text" * 50)
    for name, options in (("digits", {}), ("synthetic", {"size": 16}), ("text", {"root": tmp_path / "t", "size": 8})):
        data = load_dataset(name, **options)
        form = microbatch_form(name, 4, data.size)
        for source in (TrainSource(data, 4, seed=0), EvalSource(data, 4)):
            form.require(source.inputs(0), name)
        assert (data.train.in_memory, data.test.in_memory, name in DECODED) == (True, True, False)
    write_image_folders(tmp_path)
    assert (load_dataset("imagenet", root=tmp_path).train.in_memory, "imagenet" in DECODED) == (False, True)
    assert not from_dataset([(torch.zeros(1), 0)]).in_memory


def test_the_last_part_of_a_text_is_for_testing_and_each_byte_predicts_the_next(tmp_path):
    """Bytes equal their positions from 1; 180 of 200 are for training."""
    (tmp_path / "t").write_bytes(bytes(range(1, 201)))
    data, rows = load_dataset("text", root=tmp_path / "t", size=8), torch.arange(22)
    assert (data.classes, data.size, data.train.count, data.test.count) == (256, 8, 22, 3)
    inputs, targets = data.train.inputs(rows, None), data.train.targets(rows, None)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs, torch.arange(1, 177).view(22, 8))
    assert torch.equal(targets, torch.arange(2, 178))
    source = EvalSource(data, 2)
    targets, inputs = (torch.cat([read(m).flatten() for m in range(2)]) for read in (source.targets, source.inputs))
    assert targets.tolist() == [*range(182, 201), *[-100] * 13]
    assert torch.equal(inputs[:19], targets[:19] - 1)


def test_text_that_is_missing_or_too_short(tmp_path):
    with pytest.raises(DataError, match=r"none\.txt: can't be read \(No such file or directory\); set data\.root to a text file"):
        load_dataset("text", root=tmp_path / "none.txt")
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(DataError, match=r"short\.txt: expected at least 9 bytes for training and 2 for testing, got 8 and 1"):
        load_dataset("text", root=tmp_path / "short.txt", size=8)
