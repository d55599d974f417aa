"""How fast messages travel between neighbouring processes, and between replicas."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from petra.plan.layout import processes_per_replica

SMALL, LARGE = 64, 64 * 2**20
"""Bytes: one that only latency counts for, and about what a stage sends (x of 64 CIFAR-10 images at full width: 33.5 MB)."""
ROUND_TRIPS, MESSAGES = 100, 4


@dataclass(frozen=True)
class Link:
    """Between ranks ``rank`` and ``rank`` + ``step``."""

    rank: int
    latency: float
    """Seconds for a small message, half a round trip."""
    forward: float
    """Bytes per second of large messages from ``rank`` to the other."""
    backward: float
    """The same the other way."""
    step: int = 1


def measure_links(device: torch.device, dp: int = 1) -> list[Link]:
    """Measures one link after another, so that none disturbs another; returned in every process, all of which call this.

    First those between neighbours in each of ``dp`` lines, then those between neighbouring replicas.
    """
    world = dist.get_world_size()
    line = processes_per_replica(world, dp)
    pairs = [(rank, 1) for rank in range(world - 1) if (rank + 1) % line]
    pairs += [(rank, line) for rank in range(world - line)]  # none without replicas
    found: list[Link | None] = []
    for rank, step in pairs:
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        found.append(_measure(rank, step, device) if dist.get_rank() in (rank, rank + step) else None)
    everywhere: list[list[Link | None]] = [[] for _ in range(world)]
    dist.all_gather_object(everywhere, found)
    links = (everywhere[rank][i] for i, (rank, _) in enumerate(pairs))  # as the left one of each pair saw it
    return [link for link in links if link is not None]


def _measure(rank: int, step: int, device: torch.device) -> Link:
    left = dist.get_rank() == rank
    peer = rank + step if left else rank
    small, large = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (SMALL, LARGE))
    for message in (small, large):  # opens the connections
        _there_and_back(message, message, 1, left, peer)
    latency = _there_and_back(small, small, ROUND_TRIPS, left, peer) / (2 * ROUND_TRIPS)
    # A small answer follows each large message, so that it has arrived when the clock stops.
    forward = _there_and_back(large, small, MESSAGES, left, peer)
    backward = _there_and_back(small, large, MESSAGES, left, peer)
    return Link(rank, latency, MESSAGES * LARGE / forward, MESSAGES * LARGE / backward, step)


def _there_and_back(there: Tensor, back: Tensor, times: int, left: bool, peer: int) -> float:
    """Seconds for ``times`` exchanges, each begun by the left process."""
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
