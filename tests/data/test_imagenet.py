"""Image files in folders of classes, and CIFAR and ImageNet32 in small files of their original formats."""

import io
import json
import pickle
import random
import re
import shutil
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from launch.config.compose import compose_overrides
from launch.run.data import load
from petra.data import EvalSource, Preparation, TrainSource, load_dataset, releases
from petra.data.arrays import augment
from petra.data.imagenet import MOMENTS, cropped, random_box
from petra.data.releases import CIFAR10, CIFAR100, IMAGENET32
from petra.errors import ConfigError, DataError
from petra.inplace_abn.label_maps import read_image
from tests.support.fakes import Evil, jpeg, md5, pickled, smooth_image, write_image_folders, write_pickle, write_release

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
    assert (data.classes, data.size, data.train.count, data.test.count, data.vocabulary) == (3, 16, 12, 6, "n00 n01 n02")
    assert data.train.targets(torch.arange(12), None).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.test.targets(torch.arange(6), None).tolist() == [0, 0, 1, 1, 2, 2]
    # Files are sorted by name, so n01/2.JPEG has index 6.
    expected = torch.tensor(cropped(folders / "train" / "n01" / "2.JPEG", 16, None)).permute(2, 0, 1)
    assert torch.equal(data.train.inputs(torch.tensor([6]), None)[0], (expected - 255 * MEAN) / (255 * STD))
    source = EvalSource(data, 4)
    last = source.inputs(1)
    assert (source.batches, last.shape, last.dtype) == (2, (4, 3, 16, 16), torch.float32)
    assert torch.equal(last[1], last[3])
    assert source.targets(1).tolist() == [2, 2, -100, -100]


def test_evaluation_takes_the_centre_of_the_resized_image(tmp_path):
    """The shorter side of 45x90 becomes 32, of which 28 are kept. The content determines the format, and colours become RGB."""
    path = tmp_path / "a.JPEG"
    for mode in ("L", "CMYK", "RGB"):
        path.write_bytes(jpeg(smooth_image(45, 90, mode)))
        with Image.open(path) as image:
            expected = image.convert("RGB").resize((32, 64), Image.Resampling.BILINEAR).crop((2, 18, 30, 46))
        assert np.array_equal(cropped(path, 28, None), np.asarray(expected))
    smooth_image(32, 32).save(path, "PNG")
    assert np.array_equal(cropped(path, 28, None), np.asarray(smooth_image(32, 32).crop((2, 2, 30, 30))))


def test_16_bit_greyscale_keeps_its_brightness(tmp_path):
    """A file of twice the bits shows the same picture, wherever images are read."""
    grey = np.asarray(smooth_image(32, 32, "L"))
    for name, values in (("8.png", grey), ("16.png", grey.astype(np.uint16) * 257)):
        Image.fromarray(values).save(tmp_path / name)
    for read in (lambda path: cropped(path, 28, random.Random(0)), Preparation(28, MOMENTS), read_image):
        assert np.array_equal(np.asarray(read(tmp_path / "16.png")), np.asarray(read(tmp_path / "8.png")))


def with_exif(content: bytes, exif: bytes) -> bytes:
    """Return a JPEG file with a segment of EXIF behind its first one."""
    end = 4 + int.from_bytes(content[4:6], "big")
    return content[:end] + b"\xff\xe1" + (8 + len(exif)).to_bytes(2, "big") + b"Exif\0\0" + exif + content[end:]


def with_chunk(content: bytes, name: bytes, value: bytes) -> bytes:
    """Return a PNG file with a chunk before its pixels."""
    at, chunk = content.index(b"IDAT") - 4, name + value
    return content[:at] + len(value).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") + content[at:]


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    image.save(buffer := io.BytesIO(), form, **options)
    return buffer.getvalue()


SMOOTH = smooth_image(48, 32)


@pytest.mark.parametrize(
    "content",
    [
        with_exif(saved(SMOOTH, "JPEG", dpi=(72, 72)), b"\0\x08\0\x02\x01\x12\0\x03"),
        with_exif(saved(SMOOTH, "JPEG", dpi=(72, 72)), b"II*\0\xff\xff\xff\x7f"),
        with_exif(jpeg(SMOOTH), b"MM\0*\0"),
        with_chunk(saved(SMOOTH, "PNG"), b"eXIf", b"garbage!"),
        with_chunk(saved(SMOOTH, "PNG"), b"tEXt", b"Raw profile type exif\0\nexif\n      20\nno hexadecimal digits\n"),
    ],
)
def test_damaged_exif_leaves_the_pixels(content: bytes, tmp_path: Path) -> None:
    """Wherever images are read: for training, for petra predict, and for segmentation."""
    (tmp_path / "a.JPEG").write_bytes(content)
    with Image.open(tmp_path / "a.JPEG") as image:
        image.convert("RGB").save(tmp_path / "plain.png")
    for read in (lambda path: cropped(path, 28, random.Random(0)), Preparation(28, MOMENTS), read_image):
        assert np.array_equal(np.asarray(read(tmp_path / "a.JPEG")), np.asarray(read(tmp_path / "plain.png")))


@pytest.mark.parametrize("turned", range(10))
def test_each_orientation_is_that_of_pillow(turned: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = turned
    SMOOTH.save(tmp_path / "a.png", exif=exif)
    with Image.open(tmp_path / "a.png") as image:
        ImageOps.exif_transpose(image).save(tmp_path / "upright.png", exif=b"")
    assert np.array_equal(cropped(tmp_path / "a.png", 28, None), cropped(tmp_path / "upright.png", 28, None))


def test_files_that_are_no_images_are_named_before_training(folders: Path) -> None:
    for name, content in (("train/n00/1.JPEG", b"<html>"), ("train/n02/0.JPEG", b""), ("train/n01/3.JPEG", JPEGS[0][:3])):
        (folders / name).write_bytes(content)
    expected = r"train/n00/1\.JPEG: can't be read as a JPEG or PNG image \(.*; and 2 more: 3\.JPEG, 0\.JPEG$"
    with pytest.raises(DataError, match=expected):
        load_dataset("imagenet", root=folders, size=16)


def test_headers_of_many_files_are_read_once_unless_a_folder_changes(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[Path]()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folders / "cache"))
    monkeypatch.setattr("petra.data.imagenet.LARGE", 2)
    monkeypatch.setattr("petra.data.imagenet.require_header", checked.append)
    for _ in range(2):
        load_dataset("imagenet", root=folders, size=16)
    assert len(checked) == 12 + 6
    (folders / "train/n00/9.JPEG").write_bytes(JPEGS[0])
    load_dataset("imagenet", root=folders, size=16)
    assert len(checked) == 12 + 6 + 13


FOLDERS = ("lost+found", "@eaDir", "$RECYCLE.BIN", "System Volume Information", ".thumbnails", "#recycle")


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_tools_leave_are_no_classes(name: str, folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    for part, images in (("train", 4), ("val", 2)):
        (folders / part / name).mkdir()
        (folders / part / name / "0.jpg").write_bytes(jpeg(smooth_image(20, 20, seed=images)))
    data = load_dataset("imagenet", root=folders, size=16)
    assert (data.vocabulary, data.train.count) == ("n00 n01 n02", 12)
    said = [record.getMessage() for record in caplog.records]
    expected = [f"{folders / part}: left out {name}, which file systems or tools leave" for part in ("train", "val")]
    assert said == ([] if name.startswith(".") else expected)


def test_a_wrong_number_of_classes_names_the_folders(folders: Path) -> None:
    for part in ("train", "val"):
        shutil.copytree(folders / part / "n00", folders / part / "backup")
    for path in folders.glob("val/backup/*"):
        path.write_bytes(jpeg(smooth_image(21, 20, seed=int(path.stem) + 77)))
    config = compose_overrides(["data=imagenet", f"data.root={folders}", "data.size=16", "data.classes=3"])
    with pytest.raises(ConfigError, match=re.escape("data.classes: expected 4 for imagenet (backup, n00, n01, n02), got 3")):
        load(config.data)


def test_more_classes_than_numbers_of_16_bits(tmp_path, monkeypatch):
    """Folders that exist in the test only, since as many take minutes to make."""
    names = [str(i) for i in range(40_000)]
    listed = {tmp_path / "train": names, tmp_path / "val": names}
    monkeypatch.setattr("petra.data.imagenet.listed", lambda folder, help: listed.get(folder, ["a.jpg"]))
    monkeypatch.setattr("petra.data.imagenet.folders_in", lambda folder, help: listed[folder])
    monkeypatch.setattr("petra.data.imagenet.require_images", lambda folder, classes, names: None)
    data = load_dataset("imagenet", root=tmp_path)
    assert data.train.targets(torch.tensor([0, data.classes - 1]), None).tolist() == [0, 39_999]


def test_area_and_aspect_ratio_of_random_crops():
    """Area uniform from 8 to 100 %, aspect ratio from 3/4 to 4/3 with median 1, and any position."""
    rng = random.Random(0)
    left, top, right, bottom = np.array([random_box(400, 400, rng) for _ in range(4000)]).T
    assert (left.min(), top.min(), right.max(), bottom.max()) == (0, 0, 400, 400)
    width, height = right - left, bottom - top
    area, ratio = width * height / 400**2, width / height
    found = [area.min(), area.max(), ratio.min(), ratio.max(), np.median(ratio)]
    assert found == pytest.approx([0.08, 1, 3 / 4, 4 / 3, 1], abs=0.03)
    fitting = np.histogram(area, bins=[0.08, 0.28, 0.48, 0.68])[0]  # larger crops fit less often and are drawn again
    assert fitting.min() > 0.88 * fitting.max()
    for size, box in (((400, 30), (180, 0, 220, 30)), ((30, 400), (0, 180, 30, 220)), ((1, 9), (0, 4, 1, 5))):  # too narrow
        assert box in {random_box(*size, random.Random(seed)) for seed in range(50)}


def test_training_images_depend_on_seed_and_index_and_half_are_flipped(folders):
    data = load_dataset("imagenet", root=folders, size=12)
    one, other = (TrainSource(data, 4, seed=3) for _ in range(2))
    expected = [one.inputs(m) for m in range(6)]
    assert all(torch.equal(other.inputs(m), expected[m]) for m in (5, 0, 3, 1))
    assert not torch.equal(expected[0], TrainSource(data, 4, seed=4).inputs(0))

    half = Image.new("RGB", (40, 40))
    half.paste((255, 255, 255), (0, 0, 20, 40))
    half.save(folders / "half.png")
    crops = [cropped(folders / "half.png", 16, random.Random(seed)).astype(int).mean((0, 2)) for seed in range(200)]
    clear = [row[-1] > row[0] for row in crops if abs(row[-1] - row[0]) > 100]
    assert len(clear) > 60
    assert 0.35 < np.mean(clear) < 0.65


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Replace up to four bytes, often near the start, where the structure is, and truncate the content."""
    places = st.integers(0, len(content) - 1) | st.integers(0, min(400, len(content)) - 1)
    result = bytearray(content)
    for place, value in draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=4)):
        result[place] = value
    return bytes(result[: draw(places | st.none())])


JPEGS, PNG, PROGRESSIVE = [jpeg(smooth_image(40, 30, mode)) for mode in ("RGB", "L", "CMYK")], io.BytesIO(), io.BytesIO()
smooth_image(40, 30).save(PNG, "PNG")
smooth_image(40, 30).save(PROGRESSIVE, "JPEG", progressive=True)
IMAGES = [*JPEGS, PNG.getvalue(), PROGRESSIVE.getvalue()]


@given(content=st.sampled_from(IMAGES).flatmap(damaged), train=st.booleans())
@example(content=b"", train=False)
@example(content=b"some text", train=False)
@example(content=b"GIF89a", train=True)
@example(content=JPEGS[0][:600], train=True)
def test_a_damaged_file_is_named_or_read(content: bytes, train: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Not all damage can be detected in these formats, so only shape and type of the result are checked."""
    path = tmp_path_factory.getbasetemp() / "damaged.JPEG"
    path.write_bytes(content)
    try:
        found: object = (image := cropped(path, 16, random.Random(0) if train else None)).shape, image.dtype
    except DataError as error:
        found = str(error)[: len(str(path)) + 40]
    assert found in (((16, 16, 3), np.uint8), f"{path}: can't be read as a JPEG or PNG image (")


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
    write_release(CIFAR10, tmp_path, monkeypatch)
    write_pickle(CIFAR10, tmp_path, "data_batch_2", pickle.dumps(Evil(tmp_path / "trace")), monkeypatch)
    with pytest.raises(DataError, match=r"data_batch_2: expected a pickle of plain containers and arrays, got one with pathlib\."):
        load_dataset("cifar10", root=tmp_path)
    assert not (tmp_path / "trace").exists()
