"""Data files with random damage. Each must raise a DataError or be read correctly.

The default is a few hundred examples; ``pytest tests/data/test_damaged_files.py --hypothesis-profile=long`` tries 5,000.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from petra.data import load_dataset
from petra.data.cifar import CIFAR10
from petra.data.imagenet import decoded
from petra.errors import DataError
from tests.support.fakes import imagenet32_batch, jpeg, pickled, smooth_image, write_cifar, write_cifar_file, write_imagenet32

T = TypeVar("T")


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Replace up to four bytes, often near the start, where the structure is. May also remove a piece, or truncate the content."""
    places = st.integers(0, len(content) - 1) | st.integers(0, min(400, len(content)) - 1)
    result = bytearray(content)
    for place, value in draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=4)):
        result[place] = value
    if draw(st.booleans()):
        start, length = draw(places), draw(st.integers(1, 64))
        del result[start : start + length]
    if draw(st.booleans()):
        del result[draw(places) :]
    return bytes(result)


@pytest.fixture(scope="module")
def monkeymodule():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, monkeymodule):
    root = tmp_path_factory.mktemp("cifar")
    write_cifar(CIFAR10, root, monkeymodule)
    return root


@pytest.fixture(scope="module")
def imagenet32_npz(tmp_path_factory, monkeymodule):
    root = tmp_path_factory.mktemp("imagenet32")
    write_imagenet32(root, monkeymodule, zipped=True)
    return root


BATCH = pickled({b"data": np.arange(2 * 3072).astype(np.uint8).reshape(2, 3072), b"labels": [3, 9], b"batch_label": b"a name"})
NPZ = io.BytesIO()
np.savez_compressed(NPZ, **imagenet32_batch(10))
JPEGS = [jpeg(smooth_image(40, 30, mode)) for mode in ("RGB", "L", "CMYK")]
PNG = io.BytesIO()
smooth_image(40, 30).save(PNG, "PNG")
PROGRESSIVE = io.BytesIO()
smooth_image(40, 30).save(PROGRESSIVE, "JPEG", progressive=True)
IMAGES = [*JPEGS, PNG.getvalue(), PROGRESSIVE.getvalue()]


def attempt(load: Callable[[], T]) -> T | DataError:
    try:
        return load()
    except DataError as error:
        return error


@given(content=damaged(BATCH))
def test_cifar_file_with_wrong_md5(content: bytes, cifar: Path) -> None:
    path = cifar / CIFAR10.folder / "data_batch_1"
    whole = path.read_bytes()
    path.write_bytes(content)
    found = attempt(lambda: load_dataset("cifar10", root=cifar))
    path.write_bytes(whole)
    assert isinstance(found, DataError)
    assert str(found).startswith(f"{path}: expected a file with md5")


@given(content=damaged(BATCH))
def test_cifar_file_with_forged_md5(content: bytes, cifar: Path) -> None:
    """The content must be checked too, since a file with a given md5 can be forged."""
    with pytest.MonkeyPatch.context() as patch:
        path = write_cifar_file(CIFAR10, cifar, "test_batch", content, patch)
        found = attempt(lambda: load_dataset("cifar10", root=cifar))
    if isinstance(found, DataError):
        assert str(found).startswith(f"{path}: ")
    else:
        images, labels = found.test.inputs.images, found.test.targets.labels
        assert images.dtype == torch.uint8
        assert images.shape == (len(labels), 3, 32, 32)
        assert 0 <= labels.amin() <= labels.amax() <= 9


@given(content=damaged(NPZ.getvalue()))
def test_npz_file(content: bytes, imagenet32_npz: Path) -> None:
    path = imagenet32_npz / "val_data.npz"
    path.write_bytes(content)
    found = attempt(lambda: load_dataset("imagenet32", root=imagenet32_npz))
    if isinstance(found, DataError):
        assert str(found).startswith(f"{path}: ")
    else:
        expected = imagenet32_batch(10)
        assert np.array_equal(found.test.inputs.images.flatten(1).numpy(), expected["data"])
        assert (found.test.targets.labels + 1).tolist() == expected["labels"]


@given(content=st.sampled_from(IMAGES).flatmap(damaged), train=st.booleans())
def test_image_file(content: bytes, train: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Not all damage can be detected in these formats, so only shape and type of the result are checked."""
    path = tmp_path_factory.getbasetemp() / "damaged.JPEG"
    path.write_bytes(content)
    found = attempt(lambda: decoded(path, 16, random.Random(0) if train else None))
    if isinstance(found, DataError):
        assert str(found).startswith(f"{path}: can't be read as a JPEG or PNG image")
    else:
        assert found.shape == (16, 16, 3)
        assert found.dtype == np.uint8
