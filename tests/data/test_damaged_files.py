"""Image files with random damage. Each must raise a DataError or be read.

The default is a hundred examples; ``pytest tests/data/test_damaged_files.py --hypothesis-profile=long`` tries 1,250.
"""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from petra.data.imagenet import decoded
from petra.errors import DataError
from tests.support.fakes import jpeg, smooth_image


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


JPEGS = [jpeg(smooth_image(40, 30, mode)) for mode in ("RGB", "L", "CMYK")]
PNG = io.BytesIO()
smooth_image(40, 30).save(PNG, "PNG")
PROGRESSIVE = io.BytesIO()
smooth_image(40, 30).save(PROGRESSIVE, "JPEG", progressive=True)
IMAGES = [*JPEGS, PNG.getvalue(), PROGRESSIVE.getvalue()]


@given(content=st.sampled_from(IMAGES).flatmap(damaged), train=st.booleans())
def test_image_file(content: bytes, train: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Not all damage can be detected in these formats, so only shape and type of the result are checked."""
    path = tmp_path_factory.getbasetemp() / "damaged.JPEG"
    path.write_bytes(content)
    try:
        found: object = (image := decoded(path, 16, random.Random(0) if train else None)).shape, image.dtype
    except DataError as error:
        found = str(error)[: len(str(path)) + 40]
    assert found in (((16, 16, 3), np.uint8), f"{path}: can't be read as a JPEG or PNG image (")
