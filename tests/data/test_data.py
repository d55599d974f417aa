"""Data sources, augmentation of images in memory, data sets without files, text, and invalid settings of all data sets."""

import hashlib
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import petra.inplace_abn  # noqa: F401 (adds data sets)
from petra.data import DECODED, EvalSource, Split, TrainSource, from_dataset, load_dataset, microbatch_form
from petra.data.arrays import Images, normalise
from petra.data.dataset import labels_of
from petra.errors import ConfigError, DataError
from petra.reversible import derive_seed
from tests.support.fakes import write_image_folders
from tests.support.refusals import refuses


@pytest.fixture(scope="module")
def numbered():
    """Return 23 training images with different labels, so that targets identify the images of a microbatch."""
    data = load_dataset("synthetic", images=23, classes=5)
    return replace(data, train=replace(data.train, targets=partial(labels_of, torch.arange(23))))


def test_epochs_visit_images_in_random_order_and_drop_an_incomplete_microbatch(numbered):
    source = TrainSource(numbered, batch_size=5, seed=0)
    assert source.contents == "23 samples", "what a resumed run compares"
    assert source.batches_per_epoch == 4
    epochs = [torch.cat([source.targets(4 * epoch + i) for i in range(4)]) for epoch in range(20)]
    assert all(len(labels.unique()) == 20 for labels in epochs)
    assert len(torch.cat(epochs).unique()) == 23  # other images are left out each time
    whole = [TrainSource(numbered, batch_size=23, seed=seed).targets(epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(torch.equal(labels.sort().values, torch.arange(23)) for labels in whole)
    assert not any(torch.equal(a, b) for i, a in enumerate(whole) for b in whole[:i])


def test_microbatches_are_functions_of_their_number(numbered):
    """Inputs belong to the targets."""
    forwards, other = (TrainSource(numbered, batch_size=5, seed=3) for _ in range(2))
    expected = [(forwards.inputs(m), forwards.targets(m)) for m in range(9)]
    for m in (8, 0, 4, 3, 8, 7, 1, 5, 2, 6):
        assert torch.equal(other.targets(m), expected[m][1])
        assert torch.equal(other.inputs(m), expected[m][0])
    plain, images = TrainSource(numbered, batch_size=5, seed=3, augment=False), numbered.train.inputs
    for m in range(6):
        assert torch.equal(plain.inputs(m), normalise(images.images[expected[m][1]], images.moments))


def test_share_selects_rows_of_the_microbatch(numbered):
    whole, tests = TrainSource(numbered, batch_size=6, seed=3), EvalSource(numbered, batch_size=4)
    for rows in (slice(0, 2), slice(2, 4)):
        share, test = TrainSource(numbered, 6, seed=3, share=rows), EvalSource(numbered, 4, share=rows)
        for m in range(tests.batches):
            assert torch.equal(share.inputs(m), whole.inputs(m)[rows])
            assert torch.equal(share.targets(m), whole.targets(m))
            assert torch.equal(test.inputs(m), tests.inputs(m)[rows])
            assert torch.equal(test.targets(m), tests.targets(m))


def test_augmentation_does_not_depend_on_the_batch_size(numbered):
    """Two epochs read sample by sample, in batches of 23 and, as far as they go, in batches of 5: each sample looks the same."""
    for split in (numbered.train, from_dataset(Noisy(range(23)))):

        def read(batch_size, batches, split=split):
            source = TrainSource(split, batch_size, seed=4)
            return torch.cat([source.inputs(m) for m in batches])

        single, whole = read(1, range(46)), read(23, range(2))
        assert torch.equal(single, whole)
        assert torch.equal(read(5, range(4)), whole[:20])
        first, second = (epoch[epoch.flatten(1).sum(1).argsort()] for epoch in whole.split(23))
        assert not torch.equal(first, second), "augmentation changes from epoch to epoch"
    split = Split(8, lambda indices, seed: torch.full((len(indices), 1), seed % 1000), partial(labels_of, torch.zeros(8)))
    source = TrainSource(split, 2, seed=0)  # its reader draws for a whole microbatch
    assert len({source.inputs(m)[0].item() for m in range(4)}) == 4


class Noisy(list):
    """Data set whose samples draw random numbers."""

    def __getitem__(self, index):
        return torch.rand(3), index


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"batch_size": value}, "data.batch_size: expected an integer ") for value in (0, 2.5, "4")),
        ({"share": 3}, "share: expected a slice, got 3"),
        *(({"timeout": value}, f"timeout: expected a number > 0, got {value}") for value in (0, float("nan"), "x")),
        ({"dataset": [1, 2]}, "dataset: expected a Dataset or Split (petra.data.from_dataset makes one), got list"),
        ({"batch_size": 24, "seed": 0}, "data.batch_size: expected an integer from 1 to 23, the number of training samples of "),
    ],
)
def test_arguments_are_checked_when_a_source_is_made(numbered, changes, message):
    """And not when its first microbatch is read. Rows selected by a number would have no batch dimension."""
    for kind, arguments in ((TrainSource, {"seed": 0}), (EvalSource, {})):
        if kind is TrainSource or not {"seed", "augment"} & changes.keys():
            with pytest.raises(ConfigError, match=re.escape(message)):
                kind(**{"dataset": numbered, "batch_size": 4, **arguments, **changes})


def test_normalised_augmented_images_against_a_loop_over_pixels():
    """The reader equals, bit for bit, a loop over pixels with the same random numbers."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8, generator=generator)
    moments = ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    indices = torch.tensor([4, 0, 4, 5])
    found = Images(images, moments, flip=True)(indices, 11)

    drawn = [derive_seed(11, index) for index in indices.tolist()]
    tops, lefts, mirrored = ([number // factor % choices for number in drawn] for factor, choices in ((1, 9), (9, 9), (81, 2)))
    assert len(set(mirrored)) == 2
    expected = np.empty((4, 3, 8, 8), np.float32)
    for i, channel, row, column in np.ndindex(4, 3, 8, 8):
        y, x = row + tops[i] - 4, (7 - column if mirrored[i] else column) + lefts[i] - 4
        value = images[indices[i], channel, y, x].item() if 0 <= y < 8 and 0 <= x < 8 else 0
        mean, std = (np.float32(255) * np.float32(moment[channel]) for moment in moments)
        expected[i, channel, row, column] = (np.float32(value) - mean) / std
    assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize(("batch_size", "batches", "padded"), [(1, 5, 0), (2, 3, 1), (7, 1, 2)])
def test_evaluation_covers_the_test_set_in_full_batches(numbered, batch_size, batches, padded):
    source = EvalSource(numbered, batch_size)
    assert source.batches == batches
    inputs, targets = (torch.cat([read(m) for m in range(batches)]) for read in (source.inputs, source.targets))
    assert (inputs.shape, inputs.dtype) == ((batches * batch_size, 3, 32, 32), torch.float32)
    images = numbered.test.inputs
    expected = normalise(images.images, images.moments)
    assert torch.equal(inputs[:5], expected)
    assert torch.equal(targets[:5], numbered.test.targets(torch.arange(5), None))
    assert targets[5:].tolist() == [-100] * padded
    assert all(torch.equal(image, expected[-1]) for image in inputs[5:])


def test_digits_are_the_same_everywhere():
    """They have the usual form, and are split evenly within each class, as when the digest was taken."""
    digits = load_dataset("digits")
    train, test = digits.train.inputs.images, digits.test.inputs.images
    assert (train.shape, test.shape, digits.classes, digits.size) == ((1437, 3, 32, 32), (360, 3, 32, 32), 10, 32)
    assert not digits.train.inputs.flip
    labels = [split.targets(torch.arange(split.count), None) for split in (digits.train, digits.test)]
    content = b"".join(t.numpy().tobytes() for t in (train, test, *labels))
    assert hashlib.md5(content).hexdigest() == "8ca6435b353c787548c924b32d83b023"


FILES = ("cifar10", "cifar100", "imagenet32", "imagenet", "text", "segmentation", "cityscapes", "vistas", "cocostuff")


test_invalid_names_and_settings = refuses(
    lambda name, options: load_dataset(name, **options),
    ("mnist", {}, r"^name: expected digits, synthetic, cifar10, .* tokens.*, got mnist"),
    ("synthetic", {"images": 3}, r"data\.images: expected an integer >= 4, got 3"),
    ("text", {"validation": 1.0}, r"data\.validation: expected a number > 0 and < 1, got 1\.0"),
    ("text", {"root": "none.txt"}, r"none\.txt: can't be read \(No such file or directory\); set data\.root to a text file"),
    *((name, {}, rf"data\.root: expected a path to the files of {name}, got none; .*data\.root") for name in FILES),
    kind=(ConfigError, DataError),
)


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
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(DataError, match=r"short\.txt: expected at least 9 bytes for training and 2 for testing, got 8 and 1"):
        load_dataset("text", root=tmp_path / "short.txt", size=8)


def test_an_order_has_as_many_indices_as_there_are_samples() -> None:
    def read(indices: torch.Tensor, seed: int | None) -> torch.Tensor:
        return indices

    twice = Split(4, read, read, order=lambda generator: torch.arange(4).repeat_interleave(2))
    with pytest.raises(ConfigError, match="order: expected 4 indices, as the split has samples, got 8"):
        TrainSource(twice, 2, 0).inputs(0)
