"""Folder of a run in the memory of this machine, which outlives the processes of the run but not the process that started them.

The folder belongs to the parent process: torchrun's agent, which restarts processes that have failed. A small program
(:mod:`.keeper`) waits for the end of the agent, however it ends, and removes the folder. Folders whose keeper was killed as well
are removed when a run starts on the same machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from petra.distributed import raise_on_all_ranks
from petra.errors import ConfigError, Interrupted, require

from ..config.schema import Config
from .rank import Process

MEMORY = Path("/dev/shm")


@contextmanager
def memory_of(config: Config, process: Process) -> Iterator[Path | None]:
    """Yield the folder in memory of a run, or None if the configuration asks for none. Remove it if the run ends or stops.

    After an error, the folder remains for the restarted processes.

    Raises:
        ConfigError: If there is no memory for it.
    """
    if config.checkpoint.mirror is None:
        yield None
        return
    run = (os.path.realpath(str(config.run_dir)), process.world, config.dp, config.trainer.stages)
    with raise_on_all_ranks():
        folder = memory_folder(repr(run))
    try:
        yield folder
    except Interrupted:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def memory_folder(run: str) -> Path:
    """Create or open the folder of a run.

    Args:
        run: Text that identifies the run. Processes of the same run and the same parent get the same folder.

    Raises:
        ConfigError: If the machine has no such memory, or the folder belongs to another user.
    """
    require(os.access(MEMORY, os.W_OK), "checkpoint.mirror", f"null on a machine on which {MEMORY} can't be written", "a number")
    remove_abandoned()
    owner = os.getppid() or 1  # the parent may be outside of this container
    folder = MEMORY / f"{_prefix()}-{owner}-{_started(owner)}-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        require(folder.stat().st_uid == os.getuid(), str(folder), "a folder of this user", "one of another user")
        return folder
    except OSError as error:
        raise ConfigError(f"checkpoint.mirror: {folder} cannot be created ({error.strerror})") from error
    # A session of its own: torchrun ends the processes of a session when it restarts them.
    subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")), str(owner), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return folder


def remove_abandoned() -> None:
    """Remove folders whose owner has ended, for example because a whole job was killed."""
    for folder in MEMORY.glob(f"{_prefix()}-*"):
        owner = re.match(r"(\d+)-(\d+)-", folder.name.removeprefix(f"{_prefix()}-"))
        if owner and _started(int(owner[1])) != int(owner[2]):
            shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    """Return the start of the names of this user's folders. Process numbers have a meaning only in their namespace."""
    namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    return f"petra-{os.getuid()}-{namespace}"


def _started(pid: int) -> int | None:
    """Return when a process started, in ticks since the start of the machine, or None if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
