"""Receivers of a run's numbers: JSON Lines files, and Weights & Biases."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

from petra.errors import ConfigError
from petra.training.records import finite, read_rows, write_text_atomically, writing
from petra.training.watchers import NO_SUMMARY, Logger


class JsonLines(Logger):
    """File with one JSON object per line, readable while the run continues, with null for NaN and infinity.

    A resumed run removes the rows of later microbatches, which it trains again, and an incomplete last line.

    Args:
        path: The file.
        rows: Rows that replace the content of the file, or None to append to it.

    Raises:
        DataError: If a row cannot be written.
    """

    def __init__(self, path: Path, rows: Sequence[Mapping[str, float]] | None = None) -> None:
        self._path = path
        if rows is not None:
            write_text_atomically(path, _lines(rows))

    def log(self, row: Mapping[str, Any]) -> None:
        with writing(self._path), self._path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read() not in (b"", b"\n"):  # of a process that was killed, or a full disk
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write((json.dumps(finite(row)) + "\n").encode())

    def resume(self, state: Mapping[str, Any], clock: int) -> None:
        rows = read_rows(self._path)
        if len(kept := [row for row in rows if row.get("microbatches", 0) <= clock]) < len(rows):
            write_text_atomically(self._path, _lines(kept))


def _lines(rows: Iterable[Mapping[str, float]]) -> str:
    return "".join(json.dumps(finite(row)) + "\n" for row in rows)


class WandbLogger(Logger):
    """One run of Weights & Biases, also if training is interrupted and resumes. Its steps are microbatches.

    The identity of the run is stored in the folder, in the file ``wandb/run_id``. Offline, a resumed run writes its whole history
    again, into one folder ``wandb/offline-run-...`` that replaces those before. The environment selects the project
    (``WANDB_PROJECT``, by default petra) and the mode (``WANDB_MODE``, by default offline, which writes only to ``folder``).

    Args:
        folder: Folder of the run.
        config: Configuration of the run.
        rows: Rows logged before the run resumes, in the order of ``microbatches``.

    Raises:
        ConfigError: If the package is not installed, or refuses a setting, such as an environment variable.
        DataError: If a file cannot be written.
    """

    @staticmethod
    def require() -> None:
        """Raise ConfigError unless the package is installed."""
        if find_spec("wandb") is None:
            raise ConfigError("logger: wandb is not installed; run pip install -e '.[wandb]' or set logger=jsonl")

    def __init__(self, folder: Path, config: Mapping[str, Any], rows: Iterable[Mapping[str, float]] = ()) -> None:
        self.require()
        import wandb

        self._image: Any = wandb.Image
        stored = folder / "wandb" / "run_id"
        known = stored.exists()
        with writing(stored):
            stored.parent.mkdir(exist_ok=True)
            if not known:
                write_text_atomically(stored, token_hex(4))
            run_id = stored.read_text(encoding="utf-8").strip()
            if wandb.run is not None and wandb.run.id == run_id:  # of this process, before replicas were lost
                wandb.run.finish()
        earlier = [*stored.parent.glob(f"offline-run-*-{run_id}")]
        mode = os.environ.get("WANDB_MODE", "offline")
        offline = mode == "offline"
        if os.path.expanduser("~") == "~":  # a user without a home, as in containers
            for name in ("CONFIG", "CACHE", "DATA"):
                os.environ.setdefault(f"WANDB_{name}_DIR", str(stored.parent.absolute()))
        start: Any = wandb.init  # typed only where the extra is installed
        try:
            self._run: Any = start(
                project=os.environ.get("WANDB_PROJECT", "petra"),
                mode=mode,
                id=run_id,
                name=folder.name,
                dir=folder,
                config=dict(config),
                resume=None if offline else "allow",
                settings=wandb.Settings(console="off", silent=offline),
            )
        except Exception as error:  # of pydantic for environment variables, of wandb for keys and connections
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"logger: wandb can't start with WANDB_MODE={mode} ({reason})") from error
        with writing(stored):
            for path in earlier:
                shutil.rmtree(path)
        if offline or not known:
            for row in rows:
                self.log(row)

    def log(self, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=int(row["microbatches"]))

    def close(self, summary: Mapping[str, Any] = NO_SUMMARY, pictures: Sequence[Path] = ()) -> None:
        if pictures:
            self._run.log({f"pictures/{path.stem}": self._image(str(path)) for path in pictures})
        self._run.summary.update(dict(summary))
        self._run.finish()
