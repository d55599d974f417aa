"""Small files in the formats of real data sets, and a harmful one."""

import hashlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from petra.data.releases import Release


def pickled(content: object, core: str = "numpy.core") -> bytes:
    """Pickle content as a numpy version that names its core module ``core``. Protocol 3 stores bytes without a helper function."""
    return pickle.dumps(content, protocol=3).replace(b"numpy._core", b"numpy.core").replace(b"numpy.core", core.encode())


def write_release(
    release: Release, root: Path, monkeypatch: pytest.MonkeyPatch, core: str = "numpy.core"
) -> dict[str, dict[bytes, Any]]:
    """Write all files of a release, with four images each. The first class of each file is the number of the file."""
    batches = {}
    for number, name in enumerate(release.files):
        images = np.random.default_rng(number).integers(0, 256, (4, 3072), dtype=np.uint8)
        labels = [release.first + label for label in (number, 1, 2, 3)]
        batches[name] = {b"data": images, release.labels.encode(): labels}
        write_pickle(release, root, name, pickled(batches[name], core), monkeypatch)
    return batches


def write_pickle(release: Release, root: Path, name: str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file of a release, and expect its md5."""
    path = root / release.folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    monkeypatch.setitem(release.files, name, md5(content))
    return path


class Evil:
    """Object that creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.canary,)


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def smooth_image(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Return an image with smooth colours, which JPEG changes little."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (3, 3, len(Image.new(mode, (1, 1)).getbands())), dtype=np.uint8)
    small = Image.fromarray(corners.squeeze(), mode)
    return small.resize((width, height), Image.Resampling.BICUBIC)


def jpeg(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def write_image_folders(root: Path, classes: int = 3, train: int = 4, val: int = 2) -> None:
    """Write images of different sizes to folders n00, n01, ... in ``root``/train and ``root``/val."""
    for part, images in (("train", train), ("val", val)):
        for c in range(classes):
            folder = root / part / f"n{c:02}"
            folder.mkdir(parents=True)
            for i in range(images):
                seed = 100 * c + i + (50 if part == "val" else 0)
                (folder / f"{i}.JPEG").write_bytes(jpeg(smooth_image(40 + 3 * i, 30 + 5 * c, seed=seed)))
