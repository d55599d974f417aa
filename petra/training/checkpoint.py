"""Checkpoints of a run: one folder ``<folder>/<clock>`` for each.

A checkpoint is first written to ``<clock>.part``: the tensors of each process in a file ``<rank>.pt`` of ``torch.save``,
``facts.json``, and finally ``manifest.json`` with the size and SHA-256 of each file. The files are synced before the folder gets
its final name. An interruption at any point leaves earlier checkpoints intact.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from petra.distributed import raise_on_all_ranks
from petra.errors import DataError, invalid, is_integer, require
from petra.pipeline import Pipeline
from petra.training.records import PART, replaced
from petra.training.state import belongs_to, load_state, state_of
from petra.training.unsaved import require_ended
from petra.training.weight_files import TENSORS, State, read_tensors

log = logging.getLogger(__name__)

FACTS, MANIFEST = "facts.json", "manifest.json"
NO_FACTS: Mapping[str, Any] = {}
OWN = ("clock", "score")
"""Facts that each checkpoint has."""


class Checkpoints:
    """Writer of a run's checkpoints. It also removes old ones. All processes of the pipeline must make the same calls.

    Args:
        folder: Folder of the checkpoints, on storage that all processes share.
        keep: Number of newest checkpoints to keep. The one with the highest score is kept as well. 0: write none.
        every: Number of microbatches, counted from the start of the run, after which a trainer drains the pipeline and saves; None
            to save only at the end of an epoch.
        facts: Facts of the run, as values for JSON, which each checkpoint has.
        background: Write from a copy in memory, in a thread, while training continues. The next call raises the thread's error,
            and :attr:`failed` tells it before.
        timeout: Seconds that processes wait for each other while they write in the background.

    Raises:
        ConfigError: If ``keep`` is no integer >= 0, or ``every`` is neither None nor an integer >= 1.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        *,
        every: int | None = None,
        facts: Mapping[str, Any] = NO_FACTS,
        background: bool = False,
        timeout: float = 600,
    ) -> None:
        require(is_integer(keep) and keep >= 0, "checkpoint.keep", "an integer >= 0", keep)
        require(every is None or (is_integer(every) and every >= 1), "checkpoint.every", "None or an integer >= 1", every)
        _require_other(facts, OWN)
        self.folder, self.keep, self.every, self.facts = folder, keep, every, facts
        distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if distributed else 0
        # A group of its own: the thread's collectives run at the same time as those of training.
        separate = keep > 0 and background and distributed
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if separate else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future[None] | None = None
        if background:
            atexit.register(_tell_failed, ref(self))

    def next_after(self, clock: int) -> int | None:
        """Return the number of microbatches after which a trainer drains and saves next within an epoch, or None."""
        return None if self.every is None else clock - clock % self.every + self.every

    def save(self, pipeline: Pipeline, facts: Mapping[str, Any], score: float | None = None) -> None:
        """Write the state of a drained pipeline.

        Args:
            facts: Further facts. :func:`facts_of` returns them with those of the run.
            score: Quality of the network (higher is better), or None if it has not been evaluated. One that is not finite is None.

        Raises:
            PetraError: In every process, if the checkpoint cannot be written. Earlier checkpoints stay intact.
        """
        if not self.keep:
            return
        self.wait()
        name = f"{pipeline.microbatches_done:09}"
        with raise_on_all_ranks(self._group, f"Checkpoints.save({name})"):
            require_ended(pipeline)
        state = state_of(pipeline)
        score = score if score is not None and isfinite(score) else None
        _require_other(facts, {*OWN, *self.facts})
        content = {**self.facts, **facts, "clock": pipeline.microbatches_done, "score": score}
        if self._thread is None:
            self._write(state, name, content)
        else:
            copies = {key: value.to("cpu", copy=True) for key, value in state.items()}
            self._pending = self._thread.submit(self._write, copies, name, content)

    @property
    def failed(self) -> bool:
        """Whether the last save has failed in the background, so that the next call raises its error."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the errors of :meth:`save`."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def settle(self, seconds: float = 10.0) -> None:
        """Give a save in the background some seconds to end. If it fails, it frees the space that its files take on a full disk."""
        if self._pending is not None:
            wait_for([self._pending], seconds)

    def _write(self, state: State, name: str, facts: Mapping[str, Any]) -> None:
        try:
            self._write_files(state, name, facts)
        except Exception:
            if self._rank == 0:  # also if another process has failed
                shutil.rmtree(self.folder / f"{name}{PART}", ignore_errors=True)
            raise

    def _write_files(self, state: State, name: str, facts: Mapping[str, Any]) -> None:
        draft = self.folder / f"{name}{PART}"
        with raise_on_all_ranks(self._group), self._named_errors(name):
            if self._rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                for leftover in self.folder.glob(f"*{PART}"):  # of interrupted saves
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
                draft.mkdir()
        with raise_on_all_ranks(self._group), self._named_errors(name):
            if state:  # of other replicas than the first, only divided optimizer state
                with replaced(draft / f"{self._rank}{TENSORS}") as file:
                    torch.save({key: _compact(value) for key, value in state.items()}, file)
        with raise_on_all_ranks(self._group), self._named_errors(name):
            if self._rank == 0:
                write_synced(draft / FACTS, facts)
                write_synced(draft / MANIFEST, {"files": {path.name: checksum(path) for path in sorted(draft.iterdir())}})
                _sync_folder(draft)
                self._remove(earlier := self.folder / f"0{name}")
                if (self.folder / name).exists():  # the run resumed from an earlier checkpoint
                    (self.folder / name).rename(earlier)  # still a checkpoint until the new one has its name
                draft.rename(self.folder / name)
                self._remove(earlier)
                _sync_folder(self.folder)
                best = best_of(self.folder)
                ours = [path for path in checkpoints(self.folder) if int(path.name) <= int(name)]  # newer ones are damaged
                for old in ours[self.keep :]:
                    if old != best:
                        self._remove(old)

    def _remove(self, path: Path) -> None:
        """Rename a checkpoint before deleting it, so that a partly deleted folder never looks like a checkpoint."""
        if path.exists():
            leftover = self.folder / f"{path.name}.old{PART}"
            path.rename(leftover)
            shutil.rmtree(leftover)

    @contextmanager
    def _named_errors(self, name: str) -> Iterator[None]:
        """Convert errors of the file system, and of facts that JSON can't have, to errors that name it."""
        try:
            yield
        except (OSError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error
            earlier = (
                "earlier checkpoints are intact, resume=auto resumes from the newest"
                if checkpoints(self.folder)
                else "there is no earlier one"
            )
            raise DataError(f"checkpoint {self.folder / name}: cannot be written ({reason}); {earlier}") from error


def _tell_failed(writer: ref[Checkpoints]) -> None:
    """Log the error of a last save in the background, which no later call has raised."""
    if (found := writer()) is not None and found.failed:
        try:
            found.wait()
        except Exception as error:
            log.error("%s", error)


def checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints in a folder, newest first, intact or damaged."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.is_dir() and p.name.isdigit()), key=lambda p: int(p.name), reverse=True)


def newest(folder: Path) -> Path | None:
    """Return the newest intact checkpoint, or None if there are no checkpoints. Log a warning for each damaged one skipped.

    Raises:
        DataError: If all checkpoints are damaged.
    """
    found = checkpoints(folder)
    for path in found:
        try:
            verify(path)
        except DataError as error:
            log.warning("%s; trying the checkpoint before it", error)
        else:
            return path
    if found:
        raise invalid(str(folder), "at least one intact checkpoint", f"{len(found)} damaged", DataError)
    return None


def best_of(folder: Path) -> Path | None:
    """Return the checkpoint with the highest score, the oldest in case of a tie, or None if none has a score."""
    scored: list[tuple[float, Path]] = []
    for path in checkpoints(folder):
        with suppress(DataError):
            if (score := facts_of(path)["score"]) is not None:
                scored.append((score, path))
    return max(reversed(scored), key=lambda entry: entry[0], default=(0.0, None))[1]


def verify(path: Path) -> None:
    """Compare every file of a checkpoint with the manifest, and its name with its clock.

    Raises:
        DataError: If the checkpoint is incomplete or damaged. The message names the file.
    """
    _compare(path, {FACTS, *(tensors.name for tensors in path.glob(f"*{TENSORS}"))}, every=True)
    facts_of(path)


def _compare(path: Path, names: Collection[str], *, every: bool = False) -> None:
    """Compare files of a checkpoint with the manifest, and every other one that it lists. Raises the errors of :func:`verify`."""
    try:
        files = _read_object(path / MANIFEST)["files"]
        for name in names:
            if name not in files:
                raise DataError(f"checkpoint {path}: damaged, {MANIFEST} does not list {name}")
        for name, expected in files.items():
            if (every or name in names) and (found := _checksum(path / name)) != expected:
                raise DataError(f"checkpoint {path}: damaged, {name} has {found}, expected {expected}")
    except OSError as error:
        raise DataError(f"checkpoint {path}: incomplete, {error.filename} cannot be read ({error.strerror})") from error
    except (KeyError, AttributeError) as error:
        raise DataError(f"checkpoint {path}: damaged, {MANIFEST} lists no files") from error


def facts_of(path: Path) -> dict[str, Any]:
    """Return the facts that a checkpoint was saved with, its ``clock`` in microbatches and its ``score``.

    Raises:
        DataError: If they cannot be read, or have another clock than the name of the folder, if it is a number.
    """
    try:
        facts = _read_object(path / FACTS)
    except OSError as error:
        raise DataError(f"{path}: cannot be read as a checkpoint ({error.strerror}: {FACTS})") from error
    clock, score = facts.get("clock"), facts.get("score", "none")
    if not (isinstance(clock, int) and clock >= 0 and (score is None or isinstance(score, float | int))):
        raise DataError(f"{path}: cannot be read as a checkpoint ({FACTS} has no clock and score)")
    named = not path.name.isdigit() or int(path.name) == clock
    require(named, f"checkpoint {path}", f"the name {clock:09}, its microbatch", path.name, DataError)
    return facts


def restore(pipeline: Pipeline, path: Path) -> dict[str, Any]:
    """Load a checkpoint into this process's part of a pipeline, and return its facts.

    Raises:
        DataError: If the checkpoint is damaged or belongs to another network.
    """
    facts = facts_of(path)
    own = {name for name, _ in pipeline.blocks()}
    replica = pipeline.replica if pipeline.replicas is not None and pipeline.replicas.apart else -1  # of none: all have one state
    load_state(pipeline, _intact(path, lambda key: belongs_to(key, own, replica)), facts["clock"], str(path))
    return facts


def network(folder: Path, *, averaged: bool = False) -> State:
    """Return the whole network in a checkpoint, under the keys of an exported file.

    Args:
        folder: Folder of the checkpoint.
        averaged: Return moving averages in place of the weights.

    Raises:
        DataError: If the checkpoint is damaged, or averages are asked for and there are none.
    """
    wanted = ("model", "average") if averaged else ("model",)
    found: dict[str, State] = {part: {} for part in wanted}
    for key, value in _intact(folder, lambda key: key.split("/")[1] in wanted).items():
        block, part, name = key.split("/", 2)
        found[part][f"{block}.{name}"] = value
    if averaged and not found["average"]:
        raise invalid(str(folder), "a checkpoint with a moving average (optim.average)", "none", DataError)
    return found["model"] | found.get("average", {})


def _intact(path: Path, wanted: Callable[[str], bool]) -> State:
    """Return tensors of a checkpoint after comparing the files that have them with the manifest."""
    return read_tensors(path, wanted, lambda file: _compare(path, [FACTS, file.name]))


def checksum(path: Path) -> dict[str, int | str]:
    """Return a file's entry in the manifest: its size and SHA-256."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _checksum(path: Path) -> dict[str, int | str]:
    """Return :func:`checksum`, which a process computes once while the file's time and size stay the same."""
    state = path.stat()
    return _known_checksum(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1000)
def _known_checksum(path: Path, time: int, size: int) -> dict[str, int | str]:
    return checksum(path)


def write_synced(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of a checkpoint, and wait until it is on disk."""
    with replaced(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def _require_other(facts: Mapping[str, Any], names: Collection[str]) -> None:
    own = sorted({*names}.intersection(facts))
    require(not own, "facts", f"names other than {', '.join(sorted(names))}", ", ".join(own))


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"checkpoint {path.parent}: damaged, {path.name} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"checkpoint {path.parent}: damaged, {path.name} holds no JSON object")
    return content


def _compact(value: Tensor) -> Tensor:
    """Return a tensor on the CPU whose storage ends with it: ``torch.save`` writes whole storages."""
    value = value.detach().cpu()
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _sync_folder(folder: Path) -> None:
    """Sync a folder's entries: syncing a file does not sync its name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
