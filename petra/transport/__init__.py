"""Messages to neighbours: inside one process (local), or over torch.distributed (lockstep, edge)."""

from importlib import import_module

import torch.distributed as dist

from petra.transport.connect import check_ranks_agree, connect, open_transport, pack_boundaries
from petra.transport.local import LocalTransport, local_boundary
from petra.transport.packing import Packing
from petra.transport.port import Port, Transport

__all__ = [
    "LocalTransport",
    "Packing",
    "Port",
    "Transport",
    "check_ranks_agree",
    "connect",
    "local_boundary",
    "open_transport",
    "pack_boundaries",
]


def _import_without_group() -> None:
    """Import torch.distributed.nn while the default process group is hidden.

    Its functions bind the group that exists at their import, and would keep it alive. At exit, gloo's threads could then crash the
    interpreter.
    """
    world, dist.group.WORLD = dist.group.WORLD, None
    try:
        import_module("torch.distributed.nn.functional")
    finally:
        dist.group.WORLD = world


_import_without_group()
