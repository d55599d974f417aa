"""Speed of each process's device, and the description of all machines that auto-tuning reads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from petra.cost_model.clock import synchronized_time
from petra.cost_model.links import Connection
from petra.cost_model.links import Link as OneWay
from petra.cost_model.machines import Device, Machines
from petra.distributed import all_gather_objects

from .links import Link
from .machine import Report

SIZE, SECONDS = 1024, 0.3
"""Order of the matrices that are multiplied, and the time to measure for."""


def measure_speeds(device: torch.device) -> list[float]:
    """Return the products of matrices per second of each rank's device, one after another. Every rank must call this."""
    a = torch.randn(SIZE, SIZE, device=device)
    mine = 0.0
    for rank in range(dist.get_world_size() if dist.is_initialized() else 1):
        if dist.is_initialized():
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        if not dist.is_initialized() or rank == dist.get_rank():
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
