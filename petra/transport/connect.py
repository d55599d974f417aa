"""Connection of the stages of a plan: agreement between ranks, the transport, and the ports of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from petra.distributed import all_gather_objects, message_group
from petra.errors import ModelError, invalid, require
from petra.plan import Plan
from petra.plan.messages import Boundary
from petra.transport.edge import EdgeTransport
from petra.transport.local import LocalTransport, OwningPort, local_boundary
from petra.transport.lockstep import LockstepTransport
from petra.transport.packing import Packing
from petra.transport.port import Port, Transport


def check_ranks_agree(settings: Mapping[str, object], plan: Plan) -> None:
    """Check that all ranks run the same settings and that both ends of each boundary expect the same messages.

    Every rank must call this function.

    Args:
        settings: Settings by name, which must be equal on all ranks.
        plan: This rank's plan.

    Raises:
        ConfigError: If two ranks have different settings.
        ModelError: If the ranks at both ends of a boundary expect different messages. Raised on every rank.
    """
    gathered: list[tuple[Mapping[str, object], Sequence[Boundary]]] = all_gather_objects((settings, plan.boundaries))
    for rank, (others, _) in enumerate(gathered):
        for key, value in gathered[0][0].items():
            if others[key] != value:
                raise invalid(key, f"{value} as on rank 0", f"{others[key]} on rank {rank}")
    views, layout = [view for _, view in gathered], plan.layout
    for rank, peer in enumerate(range(layout.tp, len(views))):
        process = layout.locate(rank)[1]
        stages, following = (*layout.processes, ())[process : process + 2]
        if following:
            _check_boundary(stages[-1], (rank, peer), (views[rank], views[peer]))


def _check_boundary(j: int, ranks: tuple[int, int], views: tuple[Sequence[Boundary], Sequence[Boundary]]) -> None:
    (sent, received), (rank, peer) = (view[j] if j < len(view) else None for view in views), ranks
    name = f"messages between stage {j + 1} (rank {rank}) and stage {j + 2} (rank {peer})"
    got = f"{received or 'none'} on rank {peer}; do both run the same configuration?"
    require(sent == received, name, f"{sent or 'none'} as on rank {rank}", got, ModelError)


def open_transport(plan: Plan, device: torch.device, group: dist.ProcessGroup | None) -> Transport:
    """Open the transport between the processes of a pipeline. Every rank must call this function.

    Args:
        group: The ranks of this replica, or None if there is only one replica.
    """
    packed, processes = pack_boundaries(plan, device), plan.layout.processes
    if len(processes) == 1:
        return LocalTransport()
    if plan.transport == "edge":
        return EdgeTransport(packed, len(processes), plan.layout.tp)
    messages = message_group()
    if messages is None:
        # If batch_isend_irecv is a group's first call, all ranks must take part. After this barrier, two may call it alone.
        dist.barrier(group, device_ids=[device.index] if device.type == "cuda" and packed else None)
    return LockstepTransport(packed, processes, dist.get_rank(), messages or group, plan.layout.tp)


def pack_boundaries(plan: Plan, device: torch.device) -> list[tuple[Packing, Packing, int]]:
    """Return forward packing, backward packing and delay d of each boundary between processes."""
    packed, processes = [], plan.layout.processes
    for j in (stages[-1] for stages, following in pairwise(processes) if following):
        forward = Packing(plan.boundaries[j].forward, device, f"the message of stage {j + 1} to stage {j + 2}")
        backward = Packing(plan.boundaries[j].backward, device, f"the message of stage {j + 2} to stage {j + 1}")
        packed.append((forward, backward, plan.boundary_delays[j]))
    return packed


def connect(
    stages: range, source: Port, loss_port: Port, boundaries: Sequence[Boundary], transport: Transport
) -> dict[int, tuple[Port, Port]]:
    """Return the upstream and the downstream port of each of this process's ``stages``.

    Args:
        source: Upstream port of the first stage.
        loss_port: Downstream port of the last stage.
        boundaries: Boundary after each stage except the last.
        transport: Transport to the neighbouring processes.
    """
    if not stages:
        return {}
    inside = [local_boundary(*boundaries[j]) for j in stages[:-1]]
    first = source if 0 in stages else transport.upstream
    last = loss_port if len(boundaries) in stages else transport.downstream
    assert first is not None
    assert last is not None
    upstream = [first, *(port for _, port in inside)]
    downstream = [*(port for port, _ in inside), last]
    if inside and last is not loss_port:  # x̃ is a view of the message from the next process
        upstream[-1] = OwningPort(upstream[-1])
    return dict(zip(stages, zip(upstream, downstream, strict=True), strict=True))
