"""Data files with random damage. Each must raise a DataError or be read correctly.

The default is a few hundred examples; ``pytest tests/data/test_damaged_files.py --hypothesis-profile=long`` tries 5,000.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from petra.data.files import read_images
from petra.data.imagenet import decoded
from petra.errors import DataError
from tests.support.fakes import imagenet32_batch, jpeg, smooth_image

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


NPZ = io.BytesIO()
np.savez_compressed(NPZ, **imagenet32_batch(10))
JPEGS = [jpeg(smooth_image(40, 30, mode)) for mode in ("RGB", "L", "CMYK")]
PNG = io.BytesIO()
smooth_image(40, 30).save(PNG, "PNG")
PROGRESSIVE = io.BytesIO()
smooth_image(40, 30).save(PROGRESSIVE, "JPEG", progressive=True)
IMAGES = [*JPEGS, PNG.getvalue(), PROGRESSIVE.getvalue()]


def attempt(read: Callable[[], T]) -> T | str:
    """Return what ``read`` returns, or the message of its DataError."""
    try:
        return read()
    except DataError as error:
        return str(error)


@given(content=damaged(NPZ.getvalue()))
def test_npz_file(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(content)
    found = attempt(lambda: read_images(path, "labels", range(1, 1001), "help"))
    if isinstance(found, str):
        assert found.startswith(f"{path}: ")
    else:
        expected = imagenet32_batch(10)
        assert np.array_equal(found[0], expected["data"])
        assert (found[1] + 1).tolist() == expected["labels"]


@given(content=st.sampled_from(IMAGES).flatmap(damaged), train=st.booleans())
def test_image_file(content: bytes, train: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Not all damage can be detected in these formats, so only shape and type of the result are checked."""
    path = tmp_path_factory.getbasetemp() / "damaged.JPEG"
    path.write_bytes(content)
    found = attempt(lambda: decoded(path, 16, random.Random(0) if train else None))
    if isinstance(found, str):
        assert found.startswith(f"{path}: can't be read as a JPEG or PNG image")
    else:
        assert (found.shape, found.dtype) == ((16, 16, 3), np.uint8)
