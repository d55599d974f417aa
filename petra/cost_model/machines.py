"""Machines of a pipeline: speed and memory of the devices, latency and bandwidth of the links between processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from petra.distributed import message_group
from petra.errors import require


@dataclass(frozen=True)
class Link:
    """One direction of a connection between two processes.

    Attributes:
        bandwidth: Bytes per second.
        latency: Seconds until the first byte arrives.

    Raises:
        ConfigError: If the bandwidth is not above 0, or the latency is negative.
    """

    bandwidth: float = float("inf")
    latency: float = 0.0

    def __post_init__(self) -> None:
        require(self.bandwidth > 0, "bandwidth", "a number > 0", self.bandwidth)
        require(self.latency >= 0, "latency", "a number >= 0", self.latency)


INSTANT = Link()
"""Link on which messages take no time."""


@dataclass(frozen=True)
class Connection:
    """The links between two neighbouring processes: forward to the next process, and backward to the previous one."""

    forward: Link
    backward: Link


@dataclass(frozen=True)
class Device:
    """The device of one process.

    Attributes:
        speed: Speed relative to the device on which costs were measured.
        memory: Bytes available to its stages.

    Raises:
        ConfigError: If a value is not above 0.
    """

    speed: float = 1.0
    memory: float = float("inf")

    def __post_init__(self) -> None:
        require(self.speed > 0, "speed", "a number > 0", self.speed)
        require(self.memory > 0, "memory", "a number > 0", self.memory)


@dataclass(frozen=True)
class Machines:
    """The devices of a pipeline's processes, in order, and the connections between neighbours.

    Attributes:
        devices: Device of each process.
        connections: Connection of each process to the next one.
    """

    devices: tuple[Device, ...]
    connections: tuple[Connection, ...]

    def __post_init__(self) -> None:
        connections(self.connections, len(self.devices))

    @staticmethod
    def equal(processes: int, link: Link = INSTANT, memory: float = float("inf")) -> Machines:
        """Return machines of equal speed and memory, connected by the same link everywhere."""
        return Machines((Device(memory=memory),) * processes, connections(link, processes))


def connections(links: Link | Sequence[Connection], processes: int) -> tuple[Connection, ...]:
    """Return the connection of each process to the next one.

    Args:
        links: The same link everywhere and in both directions, or a connection for each pair of neighbours.

    Raises:
        ConfigError: If their number does not match.
    """
    if isinstance(links, Link):
        return (Connection(links, links),) * (processes - 1)
    expected = f"{processes - 1}, one between each two neighbours of {processes} processes"
    require(len(links) == processes - 1, "links", expected, len(links))
    return tuple(links)


def measure_link(device: torch.device | str = "cpu", rounds: int = 7, nbytes: int = 1 << 22) -> Link:
    """Measure the link between ranks 0 and 1. All ranks must call this function and get the same result.

    The fastest of ``rounds`` round trips counts, of a message of one byte (latency) and of one of ``nbytes`` (bandwidth). Without
    a second process, the result is :data:`INSTANT`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return INSTANT
    rank, one_way, group = dist.get_rank(), [0.0, 0.0], message_group()
    if rank < 2:
        for i, size in enumerate((1, nbytes)):
            buffer = torch.zeros(size, dtype=torch.uint8, device=device)
            times = [exchange_seconds(buffer, buffer, 1 - rank, group, sends_first=rank == 0) for _ in range(rounds + 1)]
            one_way[i] = min(times[1:]) / 2  # the first round trip opens the connection
    dist.broadcast_object_list(one_way, 0)
    latency, large = one_way
    return Link(bandwidth=nbytes / max(large - latency, 1e-9), latency=latency)


def synchronized_time(device: torch.device) -> float:
    """Wait until ``device`` has finished its queued work, then return the host's monotonic time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def exchange_seconds(
    request: Tensor, answer: Tensor, peer: int, group: dist.ProcessGroup | None, *, sends_first: bool, repeats: int = 1
) -> float:
    """Exchange messages with ``peer``, one after the other, and return the total time in seconds.

    Args:
        request: Message of the rank that sends first, of any shape; a buffer of the same form on the other rank.
        answer: Message that the other rank returns, of any shape.
        peer: The other rank.
        group: Group for messages (:func:`petra.distributed.message_group`).
        sends_first: Whether this rank sends the request.
        repeats: Number of exchanges.
    """
    start = synchronized_time(request.device)
    for _ in range(repeats):
        if sends_first:
            dist.send(request, peer, group)
            dist.recv(answer, peer, group)
        else:
            dist.recv(request, peer, group)
            dist.send(answer, peer, group)
    return synchronized_time(request.device) - start
