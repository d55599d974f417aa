"""Boundaries between stages: the form of their messages, on which both sides agree before the run, and what carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Literal

import torch
import torch.distributed as dist

from petra.errors import ConfigError, ModelError
from petra.method import Keep
from petra.settings import TransportName
from petra.specs import TensorSpec
from petra.transport import EdgeTransport, LockstepTransport, MessageSpec, Packing, Port, Transport, local_boundary

Boundary = tuple[MessageSpec, MessageSpec]
"""The forward and the backward message between two stages."""


def boundary(outputs: Sequence[TensorSpec], keep: Keep, metrics: int, *, channels_last: bool, wire: torch.dtype | None) -> Boundary:
    """The messages behind a stage with these outputs whose last block holds ``keep``; a report has ``metrics`` sums of metrics."""
    streams = tuple(
        replace(spec, channels_last=channels_last and len(spec.shape) == 4, wire=wire if spec.dtype.is_floating_point else None)
        for spec in outputs
    )
    report = TensorSpec((2 + metrics,), torch.float64)
    return (streams,), (streams if keep is Keep.NOTHING else (), streams, (report,))


def agree(settings: Mapping[str, object], boundaries: Sequence[Boundary], processes: Sequence[range], device: torch.device) -> None:
    """All processes must run the same settings, and both ends of each boundary between them expect the same messages.

    Args:
        processes: for each process of a line its stages; there may be several lines.

    Raises:
        ConfigError: on a GPU, a process group that isn't bound to it.
        ConfigError, ModelError: on every process, if any two disagree; it names the processes, or both stages.
    """
    if device.type == "cuda" and getattr(dist.group.WORLD, "bound_device_id", None) is None:
        raise ConfigError(
            "init_process_group: found no device_id, accepted is backend='cpu:gloo,cuda:nccl' with device_id=<its GPU>"
        )
    gathered: list[tuple[Mapping[str, object], Sequence[Boundary]]] = [({}, [])] * dist.get_world_size()
    dist.all_gather_object(gathered, (settings, boundaries))
    for rank, (others, _) in enumerate(gathered):
        for key, value in gathered[0][0].items():
            if others[key] != value:
                raise ConfigError(f"{key}: found {others[key]} in process {rank}, accepted is {value} as in process 0")
    views = [view for _, view in gathered]
    lines = [list(enumerate(pairwise(processes), start)) for start in range(0, len(views), len(processes))]
    for rank, (stages, after) in chain(*lines):
        if not after:
            continue
        j = stages[-1]
        sent, expected = (view[j] if j < len(view) else None for view in views[rank : rank + 2])
        if sent != expected:
            raise ModelError(
                f"stage {j + 1} (process {rank}) and stage {j + 2} (process {rank + 1}) disagree on their messages: "
                f"{_text(sent)} against {_text(expected)}; do both run the same configuration?"
            )


def choose_transport(name: TransportName, world: int, delays: Sequence[int]) -> TransportName:
    """What ``auto`` stands for with these boundary delays.

    Raises:
        ConfigError: a transport that doesn't fit the number of processes.
    """
    if world == 1:
        if name not in ("auto", "local"):
            raise ConfigError(f"transport: found {name} in one process, accepted are auto, local")
        return "local"
    if name == "auto":
        return "lockstep" if delays and set(delays) == {2} else "edge"
    if name == "local":
        raise ConfigError(f"transport: found local in {world} processes, accepted are auto, lockstep, edge")
    return name


def simulated_transport(name: TransportName, delays: Sequence[int]) -> Literal["edge", "lockstep"]:
    """The rules by which messages travel where each stage has a process of its own."""
    chosen = choose_transport("auto" if name == "local" else name, 2, delays)
    return "lockstep" if chosen == "lockstep" else "edge"


def open_transport(
    name: TransportName,
    boundaries: Sequence[Boundary],
    delays: Sequence[int],
    processes: Sequence[range],
    device: torch.device,
    line: dist.ProcessGroup | None,
) -> Transport:
    """Between processes that own these stages; every process makes the call.

    Args:
        processes: for each process of a line its stages.
        line: the group of this process's line; None if there is but one.
    """
    between = [stages[-1] for stages, after in pairwise(processes) if after]
    packed = [
        (
            Packing(boundaries[j][0], device, f"the message of stage {j + 1} to stage {j + 2}"),
            Packing(boundaries[j][1], device, f"the message of stage {j + 2} to stage {j + 1}"),
            delays[j],
        )
        for j in between
    ]
    return LockstepTransport(packed, processes, line) if name == "lockstep" else EdgeTransport(packed, len(processes))


def connect(
    stages: range, ends: tuple[Port, Port], boundaries: Sequence[Boundary], transport: Transport | None
) -> dict[int, tuple[Port, Port]]:
    """The upstream and the downstream port of each of a process's ``stages``.

    Args:
        ends: in front of the first stage of all, and behind the last.
        boundaries: between all stages, one behind each but the last.
        transport: to the processes beside this one; None if there is but one.
    """
    ports: dict[int, tuple[Port, Port]] = {}
    before, behind = (None, None) if transport is None else (transport.upstream, transport.downstream)
    upstream: Port | None = ends[0] if 0 in stages else before
    for j in stages:
        downstream: Port | None
        following: Port | None = None
        if j == len(boundaries):
            downstream = ends[1]
        elif j + 1 in stages:
            downstream, following = local_boundary(*boundaries[j])
        else:
            downstream = behind
        assert upstream is not None
        assert downstream is not None
        ports[j] = upstream, downstream
        upstream = following
    return ports


def _text(spec: Boundary | None) -> str:
    if spec is None:
        return "nothing"
    forward, backward = (", ".join(str(t) for group in message for t in group) for message in spec)
    return f"({forward}) forward and ({backward}) backward"
