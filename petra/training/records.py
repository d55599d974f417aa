"""Records of a run: its folder, JSON files, metrics as JSON lines, and optionally Weights & Biases or TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from petra.errors import ConfigError, DataError, invalid
from petra.training.lock import LOCK

PART = ".part"
"""Suffix of files and folders that are not complete yet."""


class Logger(Protocol):
    """Receiver of each epoch's numbers."""

    def log(self, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """File with one JSON object per line, readable while the run continues.

    Args:
        path: The file.
        rows: Rows that replace the content of the file, or None to append to it.

    Raises:
        DataError: If a row cannot be written.
    """

    def __init__(self, path: Path, rows: Sequence[Mapping[str, float]] | None = None) -> None:
        self._path = path
        if rows is not None:
            write_text_atomically(path, "".join(json.dumps(dict(row)) + "\n" for row in rows))

    def log(self, row: Mapping[str, float]) -> None:
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")

    def close(self) -> None:
        """Do nothing: the file is open only while a row is written."""


class WandbLogger:
    """Weights & Biases.

    Args:
        folder: Folder of the run.
        project: Name of the project on the server.
        mode: ``offline`` writes only to ``folder``; ``online`` also sends to the server.
        config: Configuration of the run.

    Raises:
        ConfigError: If the package is not installed.
    """

    def __init__(self, folder: Path, project: str, mode: str, config: dict[str, Any]) -> None:
        self.require()
        import wandb

        start: Any = wandb.init  # typed only where the extra is installed
        self._run: Any = start(project=project, mode=mode, name=folder.name, dir=folder, config=config)

    @staticmethod
    def require() -> None:
        """Raise ConfigError unless the package is installed."""
        if find_spec("wandb") is None:
            raise ConfigError("logger.name: wandb is not installed; run pip install -e '.[wandb]' or set logger=jsonl")

    def log(self, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=int(row["epoch"]))

    def close(self) -> None:
        self._run.finish()


class TensorBoardLogger:
    """Event files in a run's folder, for ``tensorboard --logdir``.

    Args:
        folder: Folder of the run.
        epochs: Number of epochs already done. TensorBoard ignores later epochs in existing files.

    Raises:
        ConfigError: If the package is not installed.
    """

    def __init__(self, folder: Path, epochs: int = 0) -> None:
        self.require()
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=epochs + 1)  # type: ignore[no-untyped-call, unused-ignore]

    @staticmethod
    def require() -> None:
        """Raise ConfigError unless the package is installed."""
        if find_spec("tensorboard") is None:
            raise ConfigError("logger.name: tensorboard is not installed; run pip install -e '.[tensorboard]' or set logger=jsonl")

    def log(self, row: Mapping[str, float]) -> None:
        for key, value in row.items():
            self._writer.add_scalar(key, value, int(row["epoch"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def new_run_folder(path: Path) -> Path:
    """Create the folder of a run. It may exist if it holds nothing but a lock and incomplete files of a run that was killed.

    Raises:
        ConfigError: If it contains other files or cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        used = any(found.suffix != PART and found.name != LOCK for found in path.iterdir())
    except OSError as error:
        raise invalid("run_dir", "a folder that can be created", f"{path} ({error.strerror})") from error
    if used:
        raise invalid("run_dir", "a new or empty folder", f"{path}, which contains files")
    return path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that is either complete or absent.

    Raises:
        DataError: If it cannot be written.
    """
    write_text_atomically(path, json.dumps(content, indent=2) + "\n")


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file that is either complete or absent.

    Raises:
        DataError: If it cannot be written.
    """
    draft = path.with_name(path.name + PART)
    with writing(path):
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of the file system to errors that name the file.

    Raises:
        DataError: If the file system raises an error inside the ``with`` block.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
