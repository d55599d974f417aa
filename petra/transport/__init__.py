"""Messages to neighbours: inside one process (local), or over torch.distributed (lockstep, edge)."""

from petra.transport.edge import EdgeTransport
from petra.transport.local import local_boundary
from petra.transport.lockstep import LockstepTransport, Transfer
from petra.transport.packing import MessageSpec, Packing
from petra.transport.port import Port

__all__ = ["EdgeTransport", "LockstepTransport", "MessageSpec", "Packing", "Port", "Transfer", "local_boundary"]
