"""The C library's allocator, which by itself gives large blocks back to the system and gets them again page by page, zeroed."""

from __future__ import annotations

import ctypes
import os
import platform

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX, ARENA_MAX = -1, -2, -4, -8
"""Of glibc's malloc.h."""
SETTINGS = {MMAP_MAX: 0, TRIM_THRESHOLD: -1, TOP_PAD: 2**26, ARENA_MAX: 1}
"""Every block lies in one heap, for all threads, that grows by 64 MiB at least and never shrinks."""


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that tensors on the CPU free: a microbatch takes what the one before it took.

    Returns:
        Whether it was done: not without glibc, nor where the environment says how its allocator shall behave.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(parameter, value) for parameter, value in SETTINGS.items()])
