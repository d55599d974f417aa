"""Latency and bandwidth of links between neighbouring ranks, and between replicas."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from petra.plan.layout import processes_per_replica

SMALL, LARGE = 64, 64 * 2**20
"""Bytes of a message that is bound by latency, and of one about as large as a stage sends (64 CIFAR-10 images: 33.5 MB)."""
ROUND_TRIPS, MESSAGES = 100, 4


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
    """Measure one link after another, so that they don't disturb each other. All ranks make this call and get all results.

    First the links between neighbouring ranks of each of the ``dp`` replicas, then the links between neighbouring replicas.
    """
    world = dist.get_world_size()
    replica_size = processes_per_replica(world, dp)
    pairs = [(rank, 1) for rank in range(world - 1) if (rank + 1) % replica_size]
    pairs += [(rank, replica_size) for rank in range(world - replica_size)]  # none without replicas
    found: list[Link | None] = []
    for rank, step in pairs:
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        found.append(_measure(rank, step, device) if dist.get_rank() in (rank, rank + step) else None)
    everywhere: list[list[Link | None]] = [[] for _ in range(world)]
    dist.all_gather_object(everywhere, found)
    links = (everywhere[rank][i] for i, (rank, _) in enumerate(pairs))  # as measured by the lower rank of each pair
    return [link for link in links if link is not None]


def _measure(rank: int, step: int, device: torch.device) -> Link:
    """Measure one link, on both of its ranks."""
    left = dist.get_rank() == rank
    peer = rank + step if left else rank
    small, large = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (SMALL, LARGE))
    for message in (small, large):  # opens the connection
        _exchange(message, message, 1, left, peer)
    latency = _exchange(small, small, ROUND_TRIPS, left, peer) / (2 * ROUND_TRIPS)
    # A small reply follows each large message, so that the message has arrived when the clock stops.
    forward = _exchange(large, small, MESSAGES, left, peer)
    backward = _exchange(small, large, MESSAGES, left, peer)
    return Link(rank, latency, MESSAGES * LARGE / forward, MESSAGES * LARGE / backward, step)


def _exchange(there: Tensor, back: Tensor, times: int, left: bool, peer: int) -> float:
    """Return the seconds for ``times`` exchanges, each started by the lower (left) rank."""
    started = time.perf_counter()
    for _ in range(times):
        if left:
            dist.send(there, peer)
            dist.recv(back, peer)
        else:
            dist.recv(there, peer)
            dist.send(back, peer)
    if there.is_cuda:
        torch.cuda.synchronize(there.device)
    return time.perf_counter() - started
