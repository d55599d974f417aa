"""Copies of a run's state in the memory of its machines, from which restarted processes resume without reading shared storage.

After each drain, every process writes its state to a folder in memory (a tmpfs such as ``/dev/shm``) and sends a copy to a process
of the next machine. The folder outlives the processes of the run, so the state is available after all of them have been restarted,
and also after one machine has been replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.errors import DataError, first_line
from petra.pipeline import Pipeline
from petra.training.records import PART, file_system_error
from petra.training.state import load_state, state_of
from petra.training.weight_files import State

SUFFIX = ".pt"


class Mirror:
    """Writer of the copies. All processes of the pipeline must make the same calls.

    A thread writes and sends the copies while training continues. A copy is removed when all processes have a newer one, so there
    is always a drain whose state is complete. Without ``torch.distributed``, and on a single machine, nothing is sent.

    Args:
        folder: Folder in the memory of this machine. Processes on the same machine share it.
        clock: Number of microbatches that the run has trained on. Copies of later drains are removed.
        timeout: Seconds that processes wait for each other.
    """

    def __init__(self, folder: Path, clock: int, timeout: float = 600) -> None:
        self.folder = folder
        distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if distributed else 0
        # A group of its own: the thread's collectives run at the same time as those of training.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if distributed else None
        receivers = neighbours(all_gather_objects(place(folder)))
        self._receiver = receivers[self._rank]
        self._senders = [rank for rank, receiver in enumerate(receivers) if receiver == self._rank]
        self._thread = ThreadPoolExecutor(1, "mirror")
        self._pending: Future[None] | None = None
        self._remove(lambda found: found > clock)

    def save(self, pipeline: Pipeline, facts: Mapping[str, Any]) -> None:
        """Copy the state of a drained pipeline, and start to write and to send the copy.

        Args:
            facts: Values that JSON can represent.

        Raises:
            PetraError: In every process, if the previous copy could not be written in one of them.
        """
        self.wait()
        state = {key: value.to("cpu", copy=True) for key, value in state_of(pipeline).items()}
        content = {"clock": pipeline.clock, "facts": json.dumps(facts), "state": state}
        self._pending = self._thread.submit(self._write, content, pipeline.clock)

    def wait(self) -> None:
        """Wait until nothing is being written or sent. Raises the errors of :meth:`save`."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(self, content: dict[str, Any], clock: int) -> None:
        own = self.folder / name(self._rank, clock)
        with raise_on_all_ranks(self._group), _named_errors(self.folder):
            torch.save(content, own.with_suffix(PART))
            own.with_suffix(PART).rename(own)
        sizes = all_gather_objects(own.stat().st_size, self._group)
        copies = {sender: self.folder / name(sender, clock) for sender in self._senders}
        with raise_on_all_ranks(self._group), _named_errors(self.folder):
            for sender, copy in copies.items():
                _allocate(copy.with_suffix(PART), sizes[sender])
        self._exchange(own, sizes, copies)
        all_gather_objects(None, self._group)  # from here on, all processes have the copies of this drain
        self._remove(lambda found: found < clock)

    def _exchange(self, own: Path, sizes: Sequence[int], copies: Mapping[int, Path]) -> None:
        """Send this process's file and receive ``copies``, from memory to memory."""
        works = []
        for sender, copy in copies.items():
            buffer = torch.from_file(str(copy.with_suffix(PART)), shared=True, size=sizes[sender], dtype=torch.uint8)
            works.append(dist.irecv(buffer, sender, self._group))
        if self._receiver is not None:
            buffer = torch.from_file(str(own), shared=False, size=sizes[self._rank], dtype=torch.uint8)
            works.append(dist.isend(buffer, self._receiver, self._group))
        for work in works:
            assert work is not None, "only a process outside the group gets no handle"
            work.wait()
        for copy in copies.values():
            copy.with_suffix(PART).rename(copy)

    def _remove(self, old: Callable[[int], bool]) -> None:
        for (_, clock), path in available(self.folder).items():
            if old(clock):
                path.unlink(missing_ok=True)


def name(rank: int, clock: int) -> str:
    """Return the name of the file with the state of a rank after ``clock`` microbatches."""
    return f"{rank}-{clock}{SUFFIX}"


def available(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the complete files in a folder, by rank and clock."""
    files = {}
    for path in folder.glob(f"*-*{SUFFIX}"):
        rank, _, clock = path.stem.partition("-")
        files[int(rank), int(clock)] = path
    return files


def place(folder: Path) -> str:
    """Return a text that is equal for processes whose folder is in the same memory."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {folder}"


def neighbours(places: Sequence[str]) -> list[int | None]:
    """Return, for each rank, the rank that keeps a copy of its state: a process of the next machine, or None if there is only one.

    Args:
        places: :func:`place` of each rank.
    """
    members: dict[str, list[int]] = {}
    for rank, found in enumerate(places):
        members.setdefault(found, []).append(rank)
    order = list(members)
    if len(order) == 1:
        return [None] * len(places)
    following = {found: members[order[(i + 1) % len(order)]] for i, found in enumerate(order)}
    return [following[found][members[found].index(rank) % len(following[found])] for rank, found in enumerate(places)]


def newest_mirrored(folder: Path, processes: int) -> int | None:
    """Return the clock of the last drain of which the state of all processes is in memory, or None. All ranks must call this.

    Args:
        processes: Number of processes of a replica. The first replica has the whole state.
    """
    found = {entry for entries in all_gather_objects(list(available(folder))) for entry in entries}
    complete = {clock for _, clock in found if all((rank, clock) in found for rank in range(processes))}
    return max(complete, default=None)


def read_mirrored(folder: Path, clock: int, processes: int) -> tuple[State, dict[str, Any]]:
    """Return the state of this rank's stages after ``clock`` microbatches, and the facts of rank 0. All ranks must call this.

    A rank whose machine doesn't have the state gets it from a rank whose machine does.

    Raises:
        DataError: If a copy can't be read. Raised on every rank.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    holders = all_gather_objects([found for found, c in available(folder) if c == clock])
    content: bytes | Path = folder / name(rank % processes, clock)
    for receiver, held in enumerate(holders):
        owner = receiver % processes
        if owner in held:
            continue
        sender = next(r for r, others in enumerate(holders) if owner in others)
        message = [(folder / name(owner, clock)).read_bytes() if rank == sender else None]
        if rank == sender:
            dist.send_object_list(message, receiver, device=torch.device("cpu"))
        if rank == receiver:
            dist.recv_object_list(message, sender, device=torch.device("cpu"))
            assert message[0] is not None
            content = message[0]
    with raise_on_all_ranks():
        state, facts = _load(content)
    return state, all_gather_objects(facts)[0]


def restore_mirrored(pipeline: Pipeline, state: State, clock: int) -> None:
    """Load what :func:`read_mirrored` has returned into this process's part of a pipeline."""
    load_state(pipeline, state, clock, "memory")


def _load(content: bytes | Path) -> tuple[State, dict[str, Any]]:
    try:
        loaded = torch.load(BytesIO(content) if isinstance(content, bytes) else content, weights_only=True)
        return loaded["state"], json.loads(loaded["facts"])
    except Exception as error:
        raise DataError(f"copy of the state in memory: cannot be read ({first_line(error)})") from error


def _allocate(path: Path, size: int) -> None:
    """Create a file whose memory is reserved: writing to mapped memory that is not available would end the process."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    """Convert errors of the file system to errors that name the key."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = file_system_error(error)
        reason = (cause.strerror if cause is not None else None) or first_line(error)
        raise DataError(f"checkpoint.mirror: {folder} cannot be written ({reason}); checkpoints on storage are intact") from error
