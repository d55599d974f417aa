"""Memory of a process."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: of CUDA tensors on a GPU, of resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
