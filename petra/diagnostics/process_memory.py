"""Memory of this process: its peak, and how allocators treat small tensors and freed memory."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import sys
from pathlib import Path

import torch

BLOCK = 512
"""Sizes of tensors are rounded up to a multiple of this number of bytes, as torch's CUDA allocator does."""
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX, ARENA_MAX = -1, -2, -4, -8
"""Parameters of ``mallopt``, from glibc's malloc.h."""
MALLOC_SETTINGS = {MMAP_MAX: 0, TRIM_THRESHOLD: -1, TOP_PAD: 2**26, ARENA_MAX: 1}
"""Allocate every block from a single heap for all threads, which grows by at least 64 MiB and never shrinks."""


def keep_freed_memory() -> bool:
    """Make the allocator keep the memory of freed CPU tensors, so that each microbatch reuses the memory of the one before.

    By default, glibc returns large blocks to the system when they are freed. The next allocation then faults every page in
    again, zeroed.

    Returns:
        True if the settings were applied. False without glibc, or if environment variables already configure the allocator.
    """
    configured = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if configured or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(parameter, value) for parameter, value in MALLOC_SETTINGS.items()])


def release_memory(device: torch.device) -> None:
    """Free what earlier runs of this process left behind, and start to measure the peak again, on GPUs and Linux.

    Reference cycles refer to a pipeline that has been used, so its tensors live until the garbage collector runs.
    """
    gc.collect()
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif platform.libc_ver()[0] == "glibc" and os.access("/proc/self/clear_refs", os.W_OK):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident set size


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated CUDA tensors on a GPU, resident set size on a CPU.

    On Linux, ``ru_maxrss`` is at least the peak of the process that started this one.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists() and (peak := status.read_text().partition("VmHWM:")[2]):  # some containers leave it out
        return 1024 * int(peak.split()[0])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rounded(size: int) -> int:
    """Return the bytes that the allocator takes for a tensor of ``size`` bytes."""
    return -(-size // BLOCK) * BLOCK
