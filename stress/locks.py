"""A lock for tests that use names which only one process of a machine may have."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def only_one(name: str) -> Iterator[None]:
    """Wait until no other process of this machine is in this context. Its programs use the same names of namespaces and devices."""
    with Path(tempfile.gettempdir(), f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
