"""The backend ``nccl`` of torch.distributed: the emulated process group in place of ProcessGroupNCCL."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def install(extension: Any) -> None:
    """Make torch.distributed use the emulated process group wherever a CUDA build uses ProcessGroupNCCL."""
    c10d._NCCL_AVAILABLE = True
    for module in (c10d, dist):
        module.is_nccl_available = lambda: True
        module.ProcessGroupNCCL = extension.ProcessGroupNCCL
