"""The checkpoints of a run: ``<folder>/<clock>`` for each, complete or not there, and ``latest``, which names the newest.

A checkpoint is written as ``<clock>.part``: every process's tensors (:mod:`petra.training.state`), ``facts.json``, and last
``manifest.json`` with the size and SHA-256 of each file. Files are synced before the folder gets its name, and ``latest`` moves
after that. Whatever is interrupted leaves the checkpoint before it as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from petra.distributed import raise_on_all_ranks
from petra.errors import ConfigError, DataError, first_line
from petra.pipeline import Pipeline
from petra.training.export import State
from petra.training.records import PART
from petra.training.state import load_state, origin, read, state_of, within, write

FACTS, MANIFEST, LATEST, METADATA = "facts.json", "manifest.json", "latest", ".metadata"


class Checkpoints:
    """Writes a run's checkpoints and removes old ones; every process of the pipeline makes the same calls.

    Args:
        folder: seen by all processes.
        keep: so many of the newest stay, and the one with the highest score.
        background: write while training goes on, from a copy in memory; an error is raised by the next call.
        timeout: seconds for which processes wait for each other while they write in the background.
    """

    def __init__(self, folder: Path, keep: int = 2, *, background: bool = False, timeout: float = 600) -> None:
        if keep < 1:
            raise ConfigError(f"checkpoint.keep: found {keep}, accepted are integers >= 1")
        self.folder, self.keep = folder, keep
        distributed = dist.is_available() and dist.is_initialized()
        self._first = not distributed or dist.get_rank() == 0
        # Calls from another thread must not come between those of training.
        separate = background and distributed
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if separate else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future[None] | None = None

    def save(self, pipeline: Pipeline, facts: Mapping[str, Any], score: float | None = None) -> None:
        """Writes the state of a drained pipeline.

        Args:
            facts: what JSON can hold and :func:`facts_of` gives back.
            score: how good the network is; None if nobody has measured.

        Raises:
            PetraError: it can't be written; in every process. The checkpoints before it are whole.
        """
        self.wait()
        state, name = state_of(pipeline), f"{pipeline.clock:09}"
        content = {**facts, "clock": pipeline.clock, "score": score}
        if self._thread is None:
            self._write(state, name, content)
        else:
            copies = {key: value.to("cpu", copy=True) for key, value in state.items()}
            self._pending = self._thread.submit(self._write, copies, name, content)

    def wait(self) -> None:
        """Until nothing is being written; raises what :meth:`save` does."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(self, state: State, name: str, facts: Mapping[str, Any]) -> None:
        draft = self.folder / f"{name}{PART}"
        with raise_on_all_ranks(self._group), self._told(name):
            if self._first:
                self.folder.mkdir(parents=True, exist_ok=True)
                for scrap in self.folder.glob(f"*{PART}"):
                    shutil.rmtree(scrap) if scrap.is_dir() else scrap.unlink()
                draft.mkdir()
        with raise_on_all_ranks(self._group), self._told(name):
            write(state, draft, self._group)
        with raise_on_all_ranks(self._group), self._told(name):
            if self._first:
                _write_synced(draft / FACTS, _json(facts))
                sums = {path.name: _sum(path) for path in sorted(draft.iterdir())}
                _write_synced(draft / MANIFEST, _json({"files": sums}))
                _sync(draft)
                self._discard(self.folder / name)  # of a trajectory that was given up
                draft.rename(self.folder / name)
                _sync(self.folder)
                _write_synced(self.folder / f"{LATEST}{PART}", f"{name}\n".encode())
                (self.folder / f"{LATEST}{PART}").replace(self.folder / LATEST)
                _sync(self.folder)
                self._remove_old()

    def _remove_old(self) -> None:
        there = checkpoints(self.folder)
        best = best_of(self.folder)
        for path in there[self.keep :]:
            if path != best:
                self._discard(path)

    def _discard(self, path: Path) -> None:
        """Takes the name away first, so that nothing half removed looks like a checkpoint."""
        if path.exists():
            scrap = self.folder / f"{path.name}.old{PART}"
            path.rename(scrap)
            shutil.rmtree(scrap)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """An error of the file system as one that names the checkpoint, and what of it was written removed."""
        try:
            yield
        except (OSError, CheckpointException) as error:
            if self._first:
                shutil.rmtree(self.folder / f"{name}{PART}", ignore_errors=True)
            raise DataError(
                f"checkpoint {self.folder / name}: can't be written ({_reason(error)}); earlier checkpoints are untouched, "
                "resume=auto goes on from the last one"
            ) from error


def checkpoints(folder: Path) -> list[Path]:
    """All in a run's folder of checkpoints, the newest first, whole or damaged."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.is_dir() and p.name.isdigit()), key=lambda p: int(p.name), reverse=True)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, with a warning for each damaged one before it; None if there is none at all.

    Raises:
        DataError: all are damaged.
    """
    there = checkpoints(folder)
    for path in there:
        try:
            verify(path)
        except DataError as error:
            print(f"warning: {error}; the one before it is taken", file=sys.stderr, flush=True)
        else:
            return path
    if there:
        raise DataError(f"{folder}: found {len(there)} checkpoint(s), all damaged, accepted is one that is whole")
    return None


def best_of(folder: Path) -> Path | None:
    """The checkpoint with the highest score, the older of two; None if none has one."""
    scored: list[tuple[float, Path]] = []
    for path in checkpoints(folder):
        try:
            score = facts_of(path)["score"]
        except DataError:
            continue
        if score is not None:
            scored.append((score, path))
    return max(reversed(scored), key=lambda found: found[0], default=(0.0, None))[1]


def verify(path: Path) -> None:
    """Compares every file of a checkpoint with the manifest.

    Raises:
        DataError: the checkpoint is torn or damaged; the text names the file.
    """
    try:
        files = _object(path / MANIFEST)["files"]
        for name, expected in files.items():
            found = _sum(path / name)
            if found != expected:
                raise DataError(f"checkpoint {path}: damaged, {name} has {found} and should have {expected}")
        for name in (FACTS, METADATA, *(tensors.name for tensors in path.glob("*.distcp"))):
            if name not in files:
                raise DataError(f"checkpoint {path}: damaged, {MANIFEST} doesn't list {name}")
    except OSError as error:
        raise DataError(f"checkpoint {path}: incomplete, {error.filename} can't be read ({error.strerror})") from error
    except (KeyError, AttributeError) as error:
        raise DataError(f"checkpoint {path}: damaged, {MANIFEST} lists no files") from error


def facts_of(path: Path) -> dict[str, Any]:
    """The facts that a checkpoint was saved with, its ``clock`` in microbatches and its ``score``.

    Raises:
        DataError: they can't be read.
    """
    try:
        facts = _object(path / FACTS)
    except OSError as error:
        raise DataError(f"{path}: can't be read as a checkpoint ({error.strerror}: {FACTS})") from error
    clock, score = facts.get("clock"), facts.get("score", "none")
    if not (isinstance(clock, int) and clock >= 0 and (score is None or isinstance(score, float | int))):
        raise DataError(f"{path}: can't be read as a checkpoint ({FACTS} has no clock and score)")
    return facts


def restore(pipeline: Pipeline, path: Path) -> dict[str, Any]:
    """Takes a checkpoint's state over into this process's part of a pipeline, and returns its facts.

    Raises:
        DataError: it can't be read, or belongs to another network.
    """
    facts = facts_of(path)
    own = {name for name, _ in pipeline.blocks()}
    load_state(pipeline, read(path, lambda key: key.split("/")[0] in own), facts["clock"], str(path))
    return facts


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"checkpoint {path.parent}: damaged, {path.name} can't be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise DataError(f"checkpoint {path.parent}: damaged, {path.name} holds no object")
    return found


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _sum(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Names in a folder reach the disk with the folder, not with the files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str:
    """The file system's own words, wherever they are wrapped."""
    found = origin(error)
    return first_line(within(error)) if found is None else str(found.strerror)
