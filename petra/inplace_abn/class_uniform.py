"""Class-uniform sampling: an epoch shows all classes about equally often (Rota Bulò et al. 2018, section 4.2)."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from petra.errors import DataError, require
from petra.inplace_abn.label_maps import Files, SampleIndex

THREADS = 4
"""Threads that read label files."""


@dataclass(frozen=True, eq=False)
class ClassUniform:
    """Order of an epoch. For each sample it draws a class, and then one of the images that have a pixel of this class.

    All classes that occur are equally probable, and so are all images with a class. The window of a sample shows a pixel of its
    class (:func:`petra.inplace_abn.crops.random_window`). An epoch has as many samples as there are images.

    Attributes:
        presence: Whether each image (row) has a pixel of each class (column).

    Raises:
        DataError: If there is no pixel of any class.
    """

    presence: NDArray[np.bool_]

    def __post_init__(self) -> None:
        expected = "shuffle, or training images with pixels of a class"
        require(bool(self.presence.any()), "data.sampling", expected, "class_uniform and only ignored pixels", DataError)

    @cached_property
    def _images(self) -> list[tuple[int, Tensor]]:
        """Each class that occurs, with the numbers of its images."""
        found = ((c, torch.from_numpy(np.flatnonzero(column))) for c, column in enumerate(self.presence.T))
        return [(c, images) for c, images in found if len(images)]

    def __call__(self, generator: Generator) -> Tensor:
        """Return the indices of an epoch (N,), see :class:`petra.inplace_abn.label_maps.SampleIndex`."""
        images, classes = self.presence.shape
        drawn = torch.randint(len(self._images), (images,), generator=generator).tolist()
        chosen = torch.rand(images, generator=generator, dtype=torch.float64).tolist()
        order = []
        for place, (which, share) in enumerate(zip(drawn, chosen, strict=True)):
            shown, having = self._images[which]
            image = int(having[int(share * len(having))])
            order.append(SampleIndex(image, shown, place).encode(images, classes))
        return torch.tensor(order)


def class_presence(files: Files) -> NDArray[np.bool_]:
    """Return whether each image (row) has a pixel of each class (column). Reads all label files.

    The result is stored in the folder ``petra`` of the user's cache, and used again as long as names, sizes, times and the meaning
    of the label files don't change.

    Raises:
        DataError: If a file can't be used.
    """
    digest = hashlib.sha256(repr((files.values, files.classes)).encode())
    for pair in files.pairs:
        status = pair.labels.stat()
        digest.update(f"{pair.labels} {status.st_size} {status.st_mtime_ns}\n".encode())
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if cache.startswith("~"):  # a user without a home, as in containers
        cache = os.devnull
    path = Path(cache) / "petra" / f"class_presence_{digest.hexdigest()[:32]}.npy"
    with suppress(OSError, ValueError, EOFError):  # not stored yet, or damaged
        found = np.load(path, allow_pickle=False)
        if found.dtype == np.bool_ and found.shape == (len(files.pairs), files.classes):
            return np.asarray(found)

    def present(index: int) -> NDArray[np.bool_]:
        labels = files.read_labels(index)
        return np.bincount(labels[labels >= 0], minlength=files.classes) > 0

    with ThreadPoolExecutor(THREADS) as threads:
        presence = np.stack(list(threads.map(present, range(len(files.pairs)))))
    with suppress(OSError):  # a cache that can't be written costs time only
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.npy")
        np.save(draft, presence)
        draft.replace(path)
    return presence
