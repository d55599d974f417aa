"""Wall-clock time that includes the work queued on a device."""

from __future__ import annotations

import time

import torch


def synchronized_time(device: torch.device) -> float:
    """Wait until ``device`` has finished its queued work, then return the host's monotonic time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
