"""Images with a class for each pixel: layouts, windows, tiles, sampling. Files that are refused: tests/data/test_bad_inputs.py."""

import random
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import chisquare

from petra.data import EvalSource, TrainSource, load_dataset
from petra.errors import DataError
from petra.inplace_abn.class_uniform import ClassUniform
from petra.inplace_abn.crops import random_window, scaled
from petra.inplace_abn.label_maps import SampleIndex
from petra.inplace_abn.segmentation import class_names
from petra.specs import IGNORED

CLASSES = 4
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the cache of class presence in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(path: Path, pixels: np.ndarray[Any, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_pair(root: Path, split: str, name: str, labels: np.ndarray[Any, Any]) -> None:
    """Write labels, and an image whose colour tells the label: 60 times the value in every channel."""
    save(root / "labels" / split / f"{name}.png", labels)
    save(root / "images" / split / f"{name}.png", np.repeat(60 * labels[..., None], 3, axis=2))


def blocks(height: int, width: int, seed: int, values: int = CLASSES) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return labels in squares of 8 pixels."""
    small = np.random.default_rng(seed).integers(0, values, (-(-height // 8), -(-width // 8)), dtype=np.uint8)
    return np.kron(small, np.ones((8, 8), np.uint8))[:height, :width]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for i in range(6):
        write_pair(tmp_path, "train", f"{i}", blocks(40 + 3 * i, 52, i))
    for i, (height, width) in enumerate([(40, 52), (24, 24), (30, 70)]):
        write_pair(tmp_path, "val", f"{i}", blocks(height, width, 50 + i))
    return tmp_path


def load(root: Path, **options: Any) -> Any:
    return load_dataset("segmentation", root=root, **{"classes": CLASSES, "size": 24, **options})


def values_in(images: torch.Tensor) -> torch.Tensor:
    """Return the label that the colour of each pixel tells, (B, H, W), before rounding."""
    return (255 * (images * STD + MEAN)).mean(1) / 60


@pytest.mark.parametrize("sampling", ["shuffle", "class_uniform"])
def test_training_images_and_labels_show_the_same_window(root: Path, sampling: str) -> None:
    """Both are read on their own, as in different processes, and agree wherever the colour is not interpolated."""
    images, labels = (TrainSource(load(root, sampling=sampling), 3, seed=5) for _ in range(2))
    compared = 0
    for m in range(8):
        found, targets = values_in(images.inputs(m)), labels.targets(m)
        assert (found.shape, targets.shape, targets.dtype) == ((3, 24, 24), (3, 24, 24), torch.int64)
        # Compare where all neighbours have the same label, away from the edges.
        found, centre = found[:, 2:-2, 2:-2], targets[:, 2:-2, 2:-2]
        neighbours = torch.nn.functional.unfold(targets[:, None].float(), 5).view(3, 25, 20, 20)
        inner = (neighbours == centre[:, None]).all(1) & (centre != IGNORED)
        assert torch.allclose(found[inner], centre[inner].float(), atol=0.02)
        compared += int(inner.sum())
    assert compared > 500


def test_scales_flips_and_positions() -> None:
    rng, whole, size = random.Random(0), (100, 60), (30, 50)
    windows = [random_window(whole, size, rng) for _ in range(4000)]
    assert 0.47 < np.mean([w.flip for w in windows]) < 0.53
    scales = np.array([w.scale for w in windows])
    assert 0.7 <= scales.min() < 0.71
    assert 1.99 < scales.max() <= 2.0
    assert abs(scales.mean() - 1.35) < 0.02
    for w in windows:
        for start, side, part in zip((w.left, w.top), whole, size, strict=True):
            room = scaled(side, w.scale) - part
            assert min(0, room) <= start <= max(0, room)


def test_tiles_count_every_pixel_once(root: Path) -> None:
    """Images of 40x52, 24x24 and 30x70 pixels in tiles of 24x24, with a padded last microbatch."""
    data = load(root)
    assert data.test.count == 2 * 3 + 1 + 2 * 3
    source = EvalSource(data, 4)
    images, targets = (torch.cat([read(m) for m in range(source.batches)]) for read in (source.inputs, source.targets))
    counted = targets != IGNORED
    assert torch.allclose(values_in(images)[counted], targets[counted].float(), atol=0.02)
    expected = np.concatenate([np.asarray(Image.open(path)).flatten() for path in (root / "labels" / "val").iterdir()])
    assert Counter(targets[counted].tolist()) == Counter(expected.tolist())


def test_class_uniform_sampling_shows_all_classes_equally_often() -> None:
    """Class 2 is in one image of twenty, class 3 in none."""
    presence = np.zeros((20, 4), bool)
    presence[:, 0], presence[::2, 1], presence[7, 2] = True, True, True
    order, generator = ClassUniform(presence), torch.Generator().manual_seed(0)
    samples = [SampleIndex.decode(i, 20, 4) for _ in range(80) for i in order(generator).tolist()]
    shown = Counter(sample.shown for sample in samples)
    assert set(shown) == {0, 1, 2}
    assert chisquare([*shown.values()]).pvalue > 1e-3
    assert all(presence[sample.image, sample.shown] for sample in samples)
    for c, images in ((0, range(20)), (1, range(0, 20, 2))):
        frequency = Counter(sample.image for sample in samples if sample.shown == c)
        assert chisquare([frequency[i] for i in images]).pvalue > 1e-3
    assert len({*order(generator).tolist()}) == 20  # repetitions of an image differ


def test_class_presence_is_cached_until_a_label_file_changes(root: Path, cache: Path) -> None:
    def presence() -> Any:
        return load(root, sampling="class_uniform").train.order.presence

    first = presence()
    expected = [
        [bool((np.asarray(Image.open(root / f"labels/train/{i}.png")) == c).any()) for c in range(CLASSES)] for i in range(6)
    ]
    assert first.tolist() == expected
    (stored,) = (cache / "petra").iterdir()
    other = np.logical_xor(first, np.arange(6)[:, None] < 3)  # such as no labels of these images would give
    np.save(stored, other)
    assert (presence() == other).all()
    write_pair(root, "train", "0", np.zeros((9, 9), np.uint8))
    assert presence()[0].tolist() == [True, False, False, False]
    for path in (cache / "petra").iterdir():
        path.write_bytes(b"damaged")
    assert presence()[0].tolist() == [True, False, False, False]
    for i in range(6):
        write_pair(root, "train", f"{i}", np.full((9, 9), 255, np.uint8))
    with pytest.raises(DataError, match="sampling: expected shuffle, or training images with pixels of a class, got class_uniform"):
        presence()


def test_a_user_without_a_home_has_no_cache(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with the number of a user alone."""
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    try:
        found = load(root, sampling="class_uniform").train.order.presence.shape
    except RuntimeError as error:
        found = error
    assert found == (6, CLASSES)
    assert not Path("~").exists()


@pytest.mark.parametrize("depth", [2, 4])
def test_labels_of_few_bits_are_refused_without_a_palette(root: Path, depth: int) -> None:
    """Pillow scales greyscale values: with many classes, 1 of 4 bits would be class 17."""
    labels, path = blocks(40, 52, 0), root / "labels/train/0.png"
    read = load(root, classes=255).train.inputs.files.read_labels
    palette = Image.fromarray(labels, "P")
    palette.putpalette([0] * 12)
    palette.save(path, bits=depth)
    assert (read(0) == labels).all()
    write_greyscale(path, labels, 8)
    assert (read(0) == labels).all()
    write_greyscale(path, labels, depth)
    message = rf"labels/train/0\.png: expected labels in one channel of 8 bits, or in a palette, got greyscale of {depth} bits$"
    with pytest.raises(DataError, match=message):
        read(0)


def write_greyscale(path: Path, values: np.ndarray[Any, Any], depth: int) -> None:
    """Write a greyscale PNG file of ``depth`` bits, which Pillow can't."""
    bits = np.unpackbits(values[..., None], axis=2)[..., -depth:].reshape(len(values), -1)
    rows = np.pad(np.packbits(bits, axis=1), ((0, 0), (1, 0)))  # the first byte of a row: no filter
    header = struct.pack(">2I5B", values.shape[1], len(values), depth, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    parts = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def all_targets(data: Any) -> torch.Tensor:
    return data.test.targets(torch.arange(data.test.count), None)


def test_cityscapes_label_ids_become_19_classes(tmp_path: Path) -> None:
    """The values of labelIds in a row of 34 pixels, in two cities."""
    ids = np.arange(34, dtype=np.uint8)[None].repeat(2, 0)
    for split, city in (("train", "aachen"), ("train", "ulm"), ("val", "lindau")):
        name = f"{city}_000001_000019"
        save(tmp_path / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png", np.zeros((2, 34, 3), np.uint8))
        save(tmp_path / "gtFine" / split / city / f"{name}_gtFine_labelIds.png", ids)
        save(tmp_path / "gtFine" / split / city / f"{name}_gtFine_color.png", np.zeros((2, 34, 4), np.uint8))
    data = load_dataset("cityscapes", root=tmp_path, size=34, height=2)
    evaluated = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]  # published as trainId 0 ... 18
    expected = [evaluated.index(i) if i in evaluated else IGNORED for i in range(34)]
    assert (data.classes, data.train.count, class_names("cityscapes", 0)[13]) == (19, 2, "car")
    assert all_targets(data)[0, 0].tolist() == expected


@pytest.mark.parametrize("labels", ["labels", "v1.2/labels"])
def test_vistas_ignores_value_65(tmp_path: Path, labels: str) -> None:
    values = np.arange(66, dtype=np.uint8)[None]
    for split in ("training", "validation"):
        save(tmp_path / split / "images" / "a.jpg", np.zeros((1, 66, 3), np.uint8))
        (tmp_path / split / labels).mkdir(parents=True)
        palette = Image.fromarray(values, "P")
        palette.putpalette(list(range(198)))
        palette.save(tmp_path / split / labels / "a.png")
    data = load_dataset("vistas", root=tmp_path, size=66, height=1)
    assert data.classes == 65
    assert all_targets(data)[0, 0].tolist() == [*range(65), IGNORED]


def test_cocostuff_has_the_91_classes_of_stuff(tmp_path: Path) -> None:
    """Values are 0 ... 90 for things, 91 ... 181 for stuff, 255 for unlabelled pixels. Images without annotations don't count."""
    values = np.array([[*range(182), 255]], np.uint8)
    for split in ("train2017", "val2017"):
        save(tmp_path / "annotations" / split / "000000000009.png", values)
        for name in ("000000000009", "000000000010"):
            save(tmp_path / "images" / split / f"{name}.jpg", np.zeros((1, 183, 3), np.uint8))
    data = load_dataset("cocostuff", root=tmp_path, size=184, height=8)
    assert (data.classes, data.train.count, class_names("cocostuff", 0)[5], class_names("camvid", 0)[5]) == (91, 1, "bush", "Tree")
    assert all_targets(data)[0, 0, :183].tolist() == [IGNORED] * 91 + [*range(91)] + [IGNORED]
