"""Messages to neighbours: inside one process (local), or over torch.distributed (lockstep, edge)."""

# Some functions of this module bind the default process group at import. Imported later, they would keep the group alive, and
# gloo's threads could crash the interpreter at exit.
import torch.distributed.nn.functional  # noqa: F401

from petra.transport.connect import Transport, check_ranks_agree, connect, open_transport, pack_boundaries
from petra.transport.local import local_boundary
from petra.transport.lockstep import LockstepTransport, Transfer
from petra.transport.packing import Packing
from petra.transport.port import Port

__all__ = [
    "LockstepTransport",
    "Packing",
    "Port",
    "Transfer",
    "Transport",
    "check_ranks_agree",
    "connect",
    "local_boundary",
    "open_transport",
    "pack_boundaries",
]
