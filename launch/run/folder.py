"""The folder of a run: who may write to it, and what its files hold."""

from __future__ import annotations

import json
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.errors import DataError, first_line, invalid, require
from petra.training import locked, read_rows
from petra.training.records import writing

from ..config.schema import Config
from ..runtime.rank import Process
from .saved import load_config

CONFIG, METRICS, UPDATES, SUMMARY = "config.yaml", "metrics.jsonl", "updates.jsonl", "summary.json"
RECORD = ".record.json"
"""How the name of a record ends: a finished run in one file, see reproduction/records/README.md."""
PROBE = ".seen_by_all_"
"""Start of the name of the file by which ranks check that they share the run's folder."""
PROBE_TIMEOUT = 60.0
"""Seconds to wait until a network file system shows a new file on other machines."""


@dataclass(frozen=True)
class RunFolder:
    """What the files of a run hold, which may still be training. All methods raise DataError if a file is damaged.

    Attributes:
        path: Folder of the run.
    """

    path: Path

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, one for each epoch.

        Raises:
            ConfigError: If the folder is not a run's, or the run has not finished an epoch.
        """
        rows = self._rows(METRICS, "epoch", "microbatches", "train_loss", "test_loss")
        if not rows:
            raise invalid("runs", "folders of runs with a finished epoch", f"{self.path}, where {METRICS} has none")
        return rows

    def updates(self, clock: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of updates.jsonl, up to ``clock`` microbatches, or none if there is no such file."""
        return [row for row in self._rows(UPDATES, "microbatches") if clock is None or row["microbatches"] <= clock]

    def gradients(self) -> list[dict[str, Any]]:
        """Return the rows of gradients.jsonl, or none if there is no such file."""
        return self._rows("gradients.jsonl", "microbatch", "stage", "reconstruction_error")

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json, or nothing if the run is not complete."""
        path = self.path / SUMMARY
        try:
            content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: can't be read ({first_line(error)})") from error
        require(isinstance(content, dict), str(path), "a JSON object", type(content).__name__, DataError)
        return dict(content)

    def config(self) -> dict[str, Any]:
        """Return the configuration in config.yaml."""
        return load_config(self.path / CONFIG)

    def _rows(self, name: str, *keys: str) -> list[dict[str, Any]]:
        """Return the rows of a file, all of which must have numbers under ``keys``."""
        path = self.path / name
        rows = read_rows(path)
        for number, row in enumerate(rows, 1):
            for key in keys:
                expected = f"a number {key} in line {number}"
                require(isinstance(row.get(key), int | float), str(path), expected, row.get(key, "none"), DataError)
        return rows


def rows_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table in a record. A row lacks the columns in which it has no value."""
    found = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{name: value for name, value in row.items() if value is not None} for row in found]


@contextmanager
def exclusive_folder(config: Config, process: Process) -> Iterator[None]:
    """Hold the lock on ``run_dir`` for the duration of the context. Every rank must enter it; rank 0 holds the lock.

    A run without ``run_dir`` has a folder of its own and needs no lock.

    Raises:
        PetraError: If another job uses the folder. Raised on every rank.
    """
    with ExitStack() as stack:
        with raise_on_all_ranks():
            if process.first and config.run_dir is not None and not stack.enter_context(locked(Path(config.run_dir))):
                refused = "so a second job with this run_dir is not refused"
                print(f"warning: the file system of {config.run_dir} has no locks, {refused}", file=sys.stderr, flush=True)
        yield


def default_folder(config: Config) -> Path:
    """Create a folder under ``runs`` for a run without ``run_dir``. Runs that start in the same second get different folders.

    Raises:
        ConfigError: If it cannot be created.
    """
    names = (config.model.name, config.method.name, config.data.name)
    name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_" + "_".join(re.sub(r"[^\w.-]", "-", part) for part in names)
    for number in count(1):
        path = Path("runs", name if number == 1 else f"{name}_{number}")
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise invalid("run_dir", "a folder, since the default one cannot be created", f"{path} ({error.strerror})") from error
    return path


def require_shared(folder: Path, config: Config, process: Process) -> None:
    """Check that all ranks share the run's folder. Every rank must call this function.

    Without a shared folder, each machine would have only a part of each checkpoint.

    Raises:
        ConfigError: If a rank does not see the folder. Raised on every rank.
    """
    probe = folder / all_gather_objects(f"{PROBE}{secrets.token_hex(8)}")[0]
    with raise_on_all_ranks():
        if process.first:
            with writing(probe):
                for stale in folder.glob(f"{PROBE}*"):  # left by a run that was killed
                    stale.unlink()
                probe.touch()
    until = time.monotonic() + min(PROBE_TIMEOUT, config.trainer.timeout / 2)
    with raise_on_all_ranks():
        while not probe.exists():
            if time.monotonic() > until:
                raise invalid(
                    "run_dir",
                    "a folder on storage that all machines share, or checkpoint.keep=0",
                    f"{folder}, which {socket.gethostname()} does not see",
                )
            time.sleep(0.1)
    if process.first:
        probe.unlink()
