"""What a process finds on its machine, and what is wrong there for a run over several processes."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

import torch

from launch.runtime.rank import Place

PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "CUDA_VISIBLE", "OMP_NUM_THREADS", "TORCH_DISTRIBUTED_")
SHARED_MEMORY = 2**30
"""Bytes of /dev/shm below which NCCL is likely to fail; containers have 64 MiB unless told otherwise."""


@dataclass(frozen=True)
class Report:
    """One process's view; plain values, so that it can be sent to the others."""

    rank: int
    node: str
    device: str
    memory: int
    """Bytes of the device."""
    cores: int
    versions: dict[str, str]
    environment: dict[str, str]
    wrong: tuple[str, ...]


def look(place: Place, device: torch.device, threads: int, interfaces: Sequence[str] | None) -> Report:
    """This process's report.

    Args:
        threads: for compute, in each process.
        interfaces: that the configuration names.
    """
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    memory = properties.total_memory if properties else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    node = os.environ.get("GROUP_RANK", "0")
    return Report(
        rank=place.rank,
        node=f"{node} ({socket.gethostname()})",
        device=f"{device} ({properties.name})" if properties else "cpu",
        memory=memory,
        cores=_cores(),
        versions=_versions(),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
        wrong=tuple(_wrong(place, device, threads, interfaces)),
    )


def compare(reports: Sequence[Report], line: int) -> list[str]:
    """What is wrong with all processes together, each thing once, the machines' own complaints first.

    Args:
        line: processes of each replica.
    """
    wrong = list(dict.fromkeys(f"node {report.node}: {text}" for report in reports for text in report.wrong))
    for name in reports[0].versions:
        found = {report.versions[name]: report.rank for report in reversed(reports)}
        if len(found) > 1:
            told = ", ".join(f"{value} (rank {rank})" for value, rank in sorted(found.items(), key=lambda item: item[1]))
            wrong.append(f"{name}: found {told}, accepted is the same in every process")
    nodes = [node for node, _ in groupby(report.node for report in reports)]
    for node, times in Counter(nodes).items():
        if times > 1:
            wrong.append(f"node {node}: its ranks don't follow each other, so neighbouring stages talk across nodes needlessly")
    most = max(Counter(report.node for report in reports).values())
    for start in range(0, len(reports), line):
        spread = list(dict.fromkeys(report.node for report in reports[start : start + line]))
        if line <= most and len(spread) > 1:
            told, stop = ", ".join(spread), start + line - 1
            wrong.append(
                f"ranks {start} to {stop}: a replica on nodes {told} that would fit on one, so its stages talk across nodes "
                f"needlessly; accepted on a node are multiples of {line} processes"
            )
    kinds = {report.device.split(":")[0] for report in reports}
    if len(kinds) > 1:
        wrong.append(f"devices: found {' and '.join(sorted(kinds))}, accepted is one kind in every process")
    return wrong


def _wrong(place: Place, device: torch.device, threads: int, interfaces: Sequence[str] | None) -> list[str]:
    wrong = []
    cuda = torch.version.cuda
    if cuda and device.type == "cpu":
        wrong.append(f"PyTorch is built for CUDA {cuda} and finds no GPU: no driver, one too old, or none given to the container")
    if not cuda and Path("/dev/nvidia0").exists():
        wrong.append("a GPU, but PyTorch is built without CUDA")
    free = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
    if device.type == "cuda" and free < SHARED_MEMORY:
        wrong.append(f"/dev/shm: found {free / 2**20:.0f} MiB, accepted are 1 GiB or more (docker run --shm-size=8g)")
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    adapters = Path("/sys/class/infiniband")
    if adapters.exists() and any(adapters.iterdir()) and memlock != resource.RLIM_INFINITY:
        wrong.append(
            f"locked memory: found {memlock / 2**20:.0f} MiB, accepted is no limit with InfiniBand (docker run --ulimit memlock=-1)"
        )
    if place.local_world * threads > _cores():
        wrong.append(f"{_cores()} core(s) for {place.local_world} process(es) of {threads} thread(s): stages slow each other down")
    if place.world > place.local_world and not interfaces and (address := _address()).startswith(("127.", "no ")):
        wrong.append(f"{socket.gethostname()} stands for {address}, which other nodes can't reach: set cluster.interfaces")
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        if os.environ.get(name) == "1":
            wrong.append(f"{name}=1: messages take a slower way than they may have to")
    if device.type == "cuda" and device.index + 1 < torch.cuda.device_count():
        other = torch.device("cuda", device.index + 1)
        if not torch.cuda.can_device_access_peer(device, other):
            wrong.append(f"{device} can't reach {other} directly: messages between them go through the host's memory")
    return wrong


def _versions() -> dict[str, str]:
    try:
        petra = version("petra")
    except PackageNotFoundError:
        petra = "not installed"
    versions = {
        "petra": petra,
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
    }
    if torch.cuda.is_available():
        versions["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        driver = Path("/sys/module/nvidia/version")
        versions["driver"] = driver.read_text().strip() if driver.exists() else "unknown"
    return versions


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "no address"
