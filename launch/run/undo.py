"""The folder of a run that starts. Until the first microbatch, an error leaves it as it was: the same command works again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from petra.errors import Interrupted
from petra.training import Watcher
from petra.training.records import replaced

from .folder import CHANGES, CHECKPOINTS, CONFIG, GRADIENTS, METRICS, SUMMARY, UPDATES

REWRITTEN = (CONFIG, METRICS, UPDATES, SUMMARY, CHANGES, GRADIENTS)
"""Files that a resumed run writes again when it starts."""


class RunFolder(Watcher):
    """The folder of a run in its first process.

    Args:
        path: The folder.
        missing: Folders that don't exist yet, innermost first: the folder itself, and those that contain it.

    Attributes:
        path: The folder.
        begun: Whether the run has trained on a microbatch, or has nothing left to train. Errors then leave its files alone.
        stale: Exports of a training that this one replaces from a checkpoint on. They are removed when it begins.
    """

    def __init__(self, path: Path, missing: Sequence[Path]) -> None:
        self.path, self.begun, self.stale, self._missing = path, False, list[Path](), missing
        self._kept = {path: path.read_bytes() if path.name in REWRITTEN else b"" for path in self._entries()}

    def microbatch(self, report: Tensor) -> None:
        self.begun = True
        while self.stale:
            self.stale.pop().unlink(missing_ok=True)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Remove what has been added and write again what has been changed if the body raises an error before the run has begun."""
        try:
            yield
        except Interrupted:
            raise
        except Exception:
            if not self.begun:
                with suppress(OSError):  # the error says what is wrong
                    self._restore()
            raise

    def _restore(self) -> None:
        for path in self._entries():
            if path in self._kept:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path, content in self._kept.items():
            if path.name in REWRITTEN and not (path.exists() and path.read_bytes() == content):
                with replaced(path) as file:  # the disk may be full
                    file.write(content)
        for path in self._missing:
            path.rmdir()  # fails if another run uses it

    def _entries(self) -> list[Path]:
        """Return the files and folders of the run, checkpoints one by one."""
        return [*self.path.glob("*"), *self.path.glob(f"{CHECKPOINTS}/*")]


def missing_folders(path: Path) -> list[Path]:
    """Return which of a folder and those that contain it don't exist, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]
