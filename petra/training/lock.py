"""Lock on a run's folder, which prevents two jobs from writing the same records and checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from petra.errors import invalid

LOCK = ".lock"
"""Name of the lock's file in the folder. The file remains after the run, when no process holds its lock."""
_HELD = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the lock on a folder for the duration of the context. Create the folder if it does not exist.

    The operating system releases the lock when the process ends, however it ends. NFS passes the lock to the server, so it also
    holds between machines. The lock is a POSIX record lock: child processes do not inherit it.

    Yields:
        Whether the lock is held. False if the file system has no locks.

    Raises:
        ConfigError: If another process holds the lock, or if the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise invalid("run_dir", "a folder that can be created", f"{folder} ({error.strerror})") from error
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                owner = file.read().strip() or "another process"
                raise invalid("run_dir", "a folder that no other run uses now", f"{folder}, in use by {owner}") from error
            if error.errno not in _UNSUPPORTED:
                raise
            yield False
            return
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
        file.flush()
        yield True
