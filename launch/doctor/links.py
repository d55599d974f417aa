"""Speed of devices, latency and bandwidth of the links between ranks, and the description of both that auto-tuning reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from petra.cost_model.machines import Connection, Device, Link, Machines, exchange_seconds
from petra.distributed import all_gather_objects, message_group
from petra.errors import invalid
from petra.plan.layout import processes_per_replica

from .machine import Report

SMALL_MESSAGE, LARGE_MESSAGE = 64, 64 * 2**20
"""Bytes of a message that is bound by latency, and of one about as large as a stage sends (64 CIFAR-10 images: 33.5 MB)."""
ROUND_TRIPS, MESSAGES = 100, 4
SLOWER = 3
"""Factor by which a link must be slower than the median of its kind to be a problem."""
SIZE, SECONDS = 1024, 0.3
"""Order of the matrices that are multiplied, and the time to measure for."""
Links = dict[tuple[int, int], Connection]
"""The connection between two ranks, the lower one first."""


def measure_links(device: torch.device, dp: int = 1) -> Links:
    """Measure one link after another, so that they don't disturb each other. Every rank must call this and gets all results.

    First the links between neighbouring ranks of each of the ``dp`` replicas, then the links between neighbouring replicas. Latency
    is half a round trip of a small message, bandwidth that of large messages.
    """
    world = dist.get_world_size()
    replica_size = processes_per_replica(world, dp)
    pairs = [(rank, rank + 1) for rank in range(world - 1) if (rank + 1) % replica_size]
    pairs += [(rank, rank + replica_size) for rank in range(world - replica_size)]  # none without replicas
    found: Links = {}
    group = message_group()
    for pair in pairs:
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        if dist.get_rank() in pair:
            found[pair] = _measure(pair, device, group)
    everywhere: list[Links] = all_gather_objects(found)
    return {pair: everywhere[pair[0]][pair] for pair in pairs}


def _measure(pair: tuple[int, int], device: torch.device, group: dist.ProcessGroup | None) -> Connection:
    """Measure one link, on both of its ranks."""
    left = dist.get_rank() == pair[0]
    peer = pair[left]
    small, large = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (SMALL_MESSAGE, LARGE_MESSAGE))
    for message in (small, large):  # opens the connection
        exchange_seconds(message, message, peer, group, sends_first=left)
    latency = exchange_seconds(small, small, peer, group, sends_first=left, repeats=ROUND_TRIPS) / (2 * ROUND_TRIPS)
    # A small reply follows each large message, so that the message has arrived when the clock stops.
    forward = exchange_seconds(large, small, peer, group, sends_first=left, repeats=MESSAGES)
    backward = exchange_seconds(small, large, peer, group, sends_first=left, repeats=MESSAGES)
    return Connection(Link(MESSAGES * LARGE_MESSAGE / forward, latency), Link(MESSAGES * LARGE_MESSAGE / backward, latency))


def slow_links(reports: Sequence[Report], links: Links) -> Iterator[str]:
    """Yield a problem for each link that is much slower, in its slower direction, than others inside nodes, or between nodes."""
    for kind in ("inside a node", "between nodes"):
        between = kind == "between nodes"
        found = {
            pair: min(link.forward.bandwidth, link.backward.bandwidth) / 1e9
            for pair, link in links.items()
            if (reports[pair[0]].node != reports[pair[1]].node) is between
        }
        usual = median(found.values()) if found else 0.0
        for (rank, other), bandwidth in found.items():
            if SLOWER * bandwidth < usual:
                expected = f"about {usual:.3g} GB/s, the median of the links {kind}"
                yield str(invalid(f"ranks {rank} – {other}", expected, f"{bandwidth:.3g} GB/s"))


def measure_speeds(device: torch.device) -> list[float]:
    """Return the products of matrices per second of each rank's device. Every rank must call this.

    All ranks measure at the same time, since processes of one machine also train at the same time.
    """
    a = torch.randn(SIZE, SIZE, device=device)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return all_gather_objects(1 / timer.blocked_autorange(min_run_time=SECONDS).median)


def describe(reports: Sequence[Report], links: Links, speeds: Sequence[float], replica_size: int) -> Machines:
    """Return the machines of the first replica. Processes on CPUs of one node share its memory."""
    processes = Counter(report.node for report in reports if report.device == "cpu")
    devices = [
        Device(speed / speeds[0], report.memory / processes.get(report.node, 1))
        for report, speed in zip(reports[:replica_size], speeds, strict=False)
    ]
    return Machines(tuple(devices), tuple(links[rank, rank + 1] for rank in range(replica_size - 1)))
