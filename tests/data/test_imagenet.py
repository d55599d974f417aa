"""Image files in folders of classes: decoding, cropping and resizing."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image

from petra.data import EvalSource, TrainSource, imagenet, load_dataset
from petra.data.imagenet import MOMENTS, decoded, one_of_ten, random_box
from petra.data.preparation import Preparation
from petra.errors import ConfigError, DataError
from petra.inplace_abn.label_maps import read_image
from tests.support.fakes import jpeg, smooth_image, write_image_folders

MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


@pytest.fixture
def folders(tmp_path):
    write_image_folders(tmp_path)
    return tmp_path


def test_folders_are_classes_in_the_order_of_their_names(folders):
    """And the last microbatch of the evaluation is padded."""
    (folders / "train" / "n01" / "notes.txt").write_text("no image")
    (folders / "train" / "labels.csv").write_text("no class")
    data = load_dataset("imagenet", root=folders, size=16)
    assert (data.classes, data.size, data.train.count, data.test.count) == (3, 16, 12, 6)
    assert data.train.targets(torch.arange(12), None).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.test.targets(torch.arange(6), None).tolist() == [0, 0, 1, 1, 2, 2]
    # Files are sorted by name, so n01/2.JPEG has index 6.
    expected = decoded(folders / "train" / "n01" / "2.JPEG", 16, None)
    pixels = data.train.inputs(torch.tensor([6]), None)[0] * STD + MEAN
    assert torch.equal((255 * pixels).round().to(torch.uint8).permute(1, 2, 0), torch.tensor(expected))
    source = EvalSource(data, 4)
    last, first = source.inputs(1), torch.tensor(decoded(folders / "val/n02/0.JPEG", 16, None)).permute(2, 0, 1)
    assert (source.batches, last.shape, last.dtype) == (2, (4, 3, 16, 16), torch.float32)
    assert torch.equal(last[0], (first - 255 * MEAN) / (255 * STD))
    assert torch.equal(last[1], last[3])
    assert source.targets(1).tolist() == [2, 2, -100, -100]


def test_evaluation_takes_the_centre_of_the_resized_image(tmp_path):
    """Compare with resizing and cropping in Pillow step by step: the shorter side of 45x90 becomes 32, of which 28 are kept."""
    path = tmp_path / "tall.JPEG"
    path.write_bytes(jpeg(smooth_image(45, 90)))
    with Image.open(path) as image:
        expected = image.resize((32, 64), Image.Resampling.BILINEAR).crop((2, 18, 30, 46))
    assert np.array_equal(decoded(path, 28, None), np.asarray(expected))


def test_colour_models_become_rgb(tmp_path):
    """The content determines the format, not the name."""
    path = tmp_path / "a.JPEG"
    for mode in ("L", "CMYK", "RGB"):
        path.write_bytes(jpeg(smooth_image(32, 32, mode)))
        found = decoded(path, 28, None).astype(float)
        expected = np.asarray(smooth_image(32, 32, mode).convert("RGB").crop((2, 2, 30, 30)), float)
        assert np.abs(found - expected).mean() < 3
    smooth_image(32, 32).save(path, "PNG")
    assert np.array_equal(decoded(path, 28, None), expected)


@pytest.mark.parametrize("reader", ["training", "evaluation", "prediction", "segmentation"])
def test_16_bit_greyscale_keeps_its_brightness(reader, tmp_path):
    """A file of twice the bits shows the same picture, wherever images are read."""
    grey = np.asarray(smooth_image(32, 32, "L"))
    for name, values in (("8.png", grey), ("16.png", grey.astype(np.uint16) * 257)):
        Image.fromarray(values).save(tmp_path / name)
    read = {
        "training": lambda path: decoded(path, 28, random.Random(0)),
        "evaluation": lambda path: decoded(path, 28, None),
        "prediction": Preparation(28, MOMENTS),
        "segmentation": lambda path: np.asarray(read_image(path)),
    }[reader]
    assert np.array_equal(read(tmp_path / "16.png"), read(tmp_path / "8.png"))


@pytest.mark.parametrize("content", [jpeg(smooth_image(60, 60))[:600], b"", b"some text", b"GIF89a"])
def test_error_names_a_file_that_is_no_image(content, tmp_path):
    (tmp_path / "broken.JPEG").write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.JPEG: can't be read as a JPEG or PNG image \(.+\); replace or remove"):
        decoded(tmp_path / "broken.JPEG", 16, None)


def test_area_and_aspect_ratio_of_random_crops():
    """Area uniform from 8 to 100 %, aspect ratio from 3/4 to 4/3 with median 1, and any position."""
    rng = random.Random(0)
    boxes = np.array([random_box(400, 400, rng) for _ in range(4000)])
    left, top, right, bottom = boxes.T
    assert boxes.min() == left.min() == top.min() == 0
    assert boxes.max() == right.max() == bottom.max() == 400
    width, height = right - left, bottom - top
    area, ratio = width * height / 400**2, width / height
    assert 0.075 < area.min() < 0.1
    assert 0.95 < area.max() <= 1
    assert 0.73 < ratio.min() < 0.77
    assert 1.3 < ratio.max() < 1.36
    assert abs(np.median(np.log(ratio))) < 0.02
    fitting = np.histogram(area, bins=[0.08, 0.28, 0.48, 0.68])[0]  # larger crops fit less often and are drawn again
    assert fitting.min() > 0.88 * fitting.max()
    for size, box in (((400, 30), (180, 0, 220, 30)), ((30, 400), (0, 180, 30, 220)), ((1, 9), (0, 4, 1, 5))):  # too narrow
        assert box in {random_box(*size, random.Random(seed)) for seed in range(50)}


def test_training_images_depend_on_seed_and_index_and_half_are_flipped(folders, monkeypatch):
    """A share decodes its own files only."""
    data = load_dataset("imagenet", root=folders, size=12)
    one, other = (TrainSource(data, 4, seed=3) for _ in range(2))
    expected = [one.inputs(m) for m in range(6)]
    assert all(torch.equal(other.inputs(m), expected[m]) for m in (5, 0, 3, 1))
    assert not torch.equal(expected[0], TrainSource(data, 4, seed=4).inputs(0))

    half = Image.new("RGB", (40, 40))
    half.paste((255, 255, 255), (0, 0, 20, 40))
    half.save(folders / "half.png")
    sides = [np.diff(decoded(folders / "half.png", 16, random.Random(s)).astype(int).mean((0, 2))).sum() for s in range(200)]
    darker, brighter = (sum(sign * side > 100 for side in sides) for sign in (-1, 1))
    assert 0.35 < brighter / (darker + brighter) < 0.65
    assert darker + brighter > 60

    decoder, opened = imagenet.decoded, []
    monkeypatch.setattr(imagenet, "decoded", lambda path, *rest, **options: opened.append(path) or decoder(path, *rest, **options))
    assert torch.equal(TrainSource(data, 4, seed=3, share=slice(2, 4)).inputs(2), expected[2][2:])
    assert len(opened) == 2


@pytest.mark.parametrize("option", ["distort", "jitter"])
def test_colours_are_changed_in_training_only(option, folders):
    plain, changed = (load_dataset("imagenet", root=folders, size=12, **{option: value}) for value in (False, True))
    one = torch.tensor([0])
    assert torch.equal(plain.test.inputs(one, None), changed.test.inputs(one, None))
    assert torch.equal(changed.train.inputs(one, 3), changed.train.inputs(one, 3))
    assert not torch.equal(changed.train.inputs(one, 3), plain.train.inputs(one, 3))
    assert torch.equal(changed.train.inputs(one, None), plain.train.inputs(one, None))


def test_invalid_folders(tmp_path):
    def refused(message, kind=DataError, **options):
        with pytest.raises(kind, match=message):
            load_dataset("imagenet", root=tmp_path, **options)

    refused(r"train: can't be read \(No such file or directory\); data\.root is a folder with train/<class>")
    write_image_folders(tmp_path)
    refused("data.crop: expected area or shorter_side, got centre", ConfigError, crop="centre")
    refused("data.crops: expected 1 or 10, got 5", ConfigError, crops=5)
    for file in (tmp_path / "val" / "n02").iterdir():
        file.rename(tmp_path / "val" / file.name)
    refused(r"val/n02: expected files that end in \.jpeg, \.jpg or \.png, got none")
    (tmp_path / "val" / "n02").rmdir()
    refused(r"expected the same classes in train and val, got n02 in one of them only")
    for folder in (tmp_path / "val").glob("n*"):
        folder.rename(tmp_path / folder.name)
    refused(r"val: expected at least 2 folders of classes, got 0; .*move the validation images")


def test_crops_of_the_shorter_side_show_the_resized_image_at_every_position(tmp_path):
    """The shorter side of 90x45 becomes 32. Crops of 28 pixels start at 0 to 36 in a row, at 0 to 4 in a column."""
    path = tmp_path / "wide.png"
    smooth_image(90, 45).save(path)
    resized = np.asarray(smooth_image(90, 45).resize((64, 32), Image.Resampling.BILINEAR))
    places = [(flip, left, top) for flip in (False, True) for left in range(37) for top in range(5)]
    known = {resized[y : y + 28, x : x + 28][:, :: -1 if f else 1].tobytes(): (f, x, y) for f, x, y in places}
    found = [known[decoded(path, 28, random.Random(seed), shorter_side=True).tobytes()] for seed in range(300)]
    flips, lefts, tops = zip(*found, strict=True)
    assert 0.4 < np.mean(flips) < 0.6
    assert (min(lefts), max(lefts), {*tops}) == (0, 36, {*range(5)})


def test_ten_crops_are_corners_centre_and_mirror_images(folders):
    image = smooth_image(80, 40)
    resized = image.resize((64, 32), Image.Resampling.BILINEAR)
    places = [(0, 0), (36, 0), (0, 4), (36, 4), (18, 2)]
    expected = [np.asarray(resized.crop((x, y, x + 28, y + 28))) for x, y in places]
    expected += [crop[:, ::-1] for crop in expected]
    assert all(np.array_equal(one_of_ten(image, 28, part), crop) for part, crop in enumerate(expected))
    data = load_dataset("imagenet", root=folders, size=16, crops=10)
    source = EvalSource(data, 20)
    assert (data.test.count, source.batches) == (60, 3)
    assert source.targets(1).reshape(2, 10).tolist() == [[1] + [-100] * 9] * 2
    for part in range(10):
        pixels = (255 * (source.inputs(1)[10 + part] * STD + MEAN)).round().permute(1, 2, 0).numpy()
        assert np.array_equal(pixels, decoded(folders / "val" / "n01" / "1.JPEG", 16, None, part=part))
