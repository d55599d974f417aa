"""Speed of devices, latency and bandwidth of the links between ranks, and the description of both that auto-tuning reads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from petra.cost_model.links import Connection, exchange_seconds, synchronized_time
from petra.cost_model.links import Link as OneWay
from petra.cost_model.machines import Device, Machines
from petra.distributed import all_gather_objects
from petra.plan.layout import processes_per_replica

from .machine import Report

SMALL, LARGE = 64, 64 * 2**20
"""Bytes of a message that is bound by latency, and of one about as large as a stage sends (64 CIFAR-10 images: 33.5 MB)."""
ROUND_TRIPS, MESSAGES = 100, 4
SIZE, SECONDS = 1024, 0.3
"""Order of the matrices that are multiplied, and the time to measure for."""


@dataclass(frozen=True)
class Link:
    """The link between the ranks ``rank`` and ``rank + step``.

    Attributes:
        latency: Seconds for a small message, half a round trip.
        forward: Bytes per second of large messages from ``rank`` to ``rank + step``.
        backward: Bytes per second in the other direction.
    """

    rank: int
    latency: float
    forward: float
    backward: float
    step: int = 1


def measure_links(device: torch.device, dp: int = 1) -> list[Link]:
    """Measure one link after another, so that they don't disturb each other. Every rank must call this and gets all results.

    First the links between neighbouring ranks of each of the ``dp`` replicas, then the links between neighbouring replicas.
    """
    world = dist.get_world_size()
    replica_size = processes_per_replica(world, dp)
    pairs = [(rank, 1) for rank in range(world - 1) if (rank + 1) % replica_size]
    pairs += [(rank, replica_size) for rank in range(world - replica_size)]  # none without replicas
    found: list[Link | None] = []
    for rank, step in pairs:
        _barrier(device)
        found.append(_measure(rank, step, device) if dist.get_rank() in (rank, rank + step) else None)
    everywhere: list[list[Link | None]] = all_gather_objects(found)
    links = (everywhere[rank][i] for i, (rank, _) in enumerate(pairs))  # as measured by the lower rank of each pair
    return [link for link in links if link is not None]


def _measure(rank: int, step: int, device: torch.device) -> Link:
    """Measure one link, on both of its ranks."""
    left = dist.get_rank() == rank
    peer = rank + step if left else rank
    small, large = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (SMALL, LARGE))
    for message in (small, large):  # opens the connection
        exchange_seconds(message, message, peer, sends_first=left)
    latency = exchange_seconds(small, small, peer, sends_first=left, repeats=ROUND_TRIPS) / (2 * ROUND_TRIPS)
    # A small reply follows each large message, so that the message has arrived when the clock stops.
    forward = exchange_seconds(large, small, peer, sends_first=left, repeats=MESSAGES)
    backward = exchange_seconds(small, large, peer, sends_first=left, repeats=MESSAGES)
    return Link(rank, latency, MESSAGES * LARGE / forward, MESSAGES * LARGE / backward, step)


def measure_speeds(device: torch.device) -> list[float]:
    """Return the products of matrices per second of each rank's device, one after another. Every rank must call this."""
    a = torch.randn(SIZE, SIZE, device=device)
    if not dist.is_initialized():
        return [_products_per_second(a)]
    mine = 0.0
    for rank in range(dist.get_world_size()):
        _barrier(device)
        if rank == dist.get_rank():
            mine = _products_per_second(a)
    return all_gather_objects(mine)


def describe(reports: Sequence[Report], links: Sequence[Link], speeds: Sequence[float], replica_size: int) -> Machines:
    """Return the machines of the first replica. Processes on CPUs of one node share its memory."""
    processes = Counter(report.node for report in reports if report.device == "cpu")
    devices = [
        Device(speed / speeds[0], report.memory / processes.get(report.node, 1))
        for report, speed in zip(reports[:replica_size], speeds, strict=False)
    ]
    within = [link for link in links if link.step == 1 and link.rank + 1 < replica_size]
    connections = [Connection(OneWay(link.forward, link.latency), OneWay(link.backward, link.latency)) for link in within]
    return Machines(tuple(devices), tuple(connections))


def _products_per_second(a: torch.Tensor) -> float:
    a @ a  # warm-up
    start, count = synchronized_time(a.device), 0
    while time.perf_counter() - start < SECONDS:
        for _ in range(4):
            a @ a
        synchronized_time(a.device)
        count += 4
    return count / (synchronized_time(a.device) - start)


def _barrier(device: torch.device) -> None:
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
