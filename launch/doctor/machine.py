"""What a process finds on its machine, and problems for a run over several processes."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from petra.errors import invalid

from ..config.schema import AUTO
from ..runtime.machine import available_cores, available_memory, unreachable
from ..runtime.rank import Process

PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "CUDA_VISIBLE", "OMP_NUM_THREADS", "TORCH_DISTRIBUTED_")
NO_GPU = "no GPU: "
"""How the problem of a process that trains on the CPU, unasked, begins."""
SHARED_MEMORY = 2**30
"""Bytes of /dev/shm below which NCCL is likely to fail. The default of containers is 64 MiB."""


@dataclass(frozen=True)
class Report:
    """Findings of one process, in plain values that other ranks can receive.

    Attributes:
        rank: Rank of the process.
        node: Rank and name of its machine.
        device: Device of the process.
        memory: Memory of the GPU in bytes, or that which all processes of the node share, up to the limit of its container.
        cores: CPU cores that the process may use, up to the quota of its container.
        versions: Versions of libraries and drivers.
        environment: Environment variables of NCCL, gloo and CUDA.
        problems: Problems on this machine.
    """

    rank: int
    node: str
    device: str
    memory: int
    cores: int
    versions: dict[str, str]
    environment: dict[str, str]
    problems: tuple[str, ...]


def inspect_machine(process: Process, device: torch.device, *, requested: str = AUTO) -> Report:
    """Return the findings of this process.

    Args:
        process: This process.
        device: Device that it would train on.
        requested: ``trainer.device`` in the configuration.
    """
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    memory = properties.total_memory if properties else available_memory()
    node = os.environ.get("GROUP_RANK", "0")
    problems = [*_gpu_problems(device, requested), *_container_problems(device), *_network_problems(process)]
    if process.local_world * (threads := torch.get_num_threads()) > available_cores():
        found = f"{process.local_world} process(es) with {threads} thread(s) each"
        problems.append(f"{available_cores()} core(s) for {found}: stages slow each other down")
    return Report(
        rank=process.rank,
        node=f"{node} ({socket.gethostname()})",
        device=f"{device} ({properties.name})" if properties else "cpu",
        memory=memory,
        cores=available_cores(),
        versions=_versions(),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
        problems=tuple(problems),
    )


def find_differences(reports: Sequence[Report], replica_size: int) -> list[str]:
    """Return the problems of all processes, each once: those of single machines first, then differences between them.

    Args:
        reports: Findings of all ranks.
        replica_size: Number of processes of each replica.
    """
    problems = list(dict.fromkeys(f"node {report.node}: {text}" for report in reports for text in report.problems))
    for name in reports[0].versions:
        found = {report.versions[name]: report.rank for report in reversed(reports)}
        if len(found) > 1:
            versions = ", ".join(f"{value} (rank {rank})" for value, rank in sorted(found.items(), key=lambda item: item[1]))
            problems.append(str(invalid(name, "the same version on every rank", versions)))
    sizes = sorted(Counter(report.node for report in reports).values(), reverse=True)
    least = sum(total < replica_size for total in accumulate(sizes))
    for start in range(0, len(reports), replica_size):
        nodes = [report.node for report in reports[start : start + replica_size]]
        crossings = sum(a != b for a, b in pairwise(nodes))
        if crossings > least:
            problems.append(
                f"ranks {start} to {start + replica_size - 1}: {crossings} boundaries are between nodes, {least} would do; run "
                f"consecutive ranks on each node, and a multiple of {replica_size} if that many fit"
            )
    kinds = {report.device.split(":")[0] for report in reports}
    if len(kinds) > 1:
        problems.append(str(invalid("devices", "the same kind on every rank", " and ".join(sorted(kinds)))))
    return problems


def missing_gpu() -> str:
    """Return why this process, which finds no GPU, has none."""
    cuda = torch.version.cuda
    if cuda:
        return f"PyTorch is built for CUDA {cuda} but finds no GPU: the driver is missing or too old, or the container has no GPU"
    found = "the machine has a GPU, but " if Path("/dev/nvidia0").exists() else ""
    return f"{found}PyTorch {torch.__version__} is built without CUDA"


def _gpu_problems(device: torch.device, requested: str) -> Iterator[str]:
    if device.type == "cpu" and requested != "cpu":
        yield f"{NO_GPU}{missing_gpu()} (trainer.device=cpu asks for none)"
    if device.type == "cuda" and " MIG " in torch.cuda.get_device_properties(device).name:
        yield f"{device} is a MIG instance: NCCL refuses two instances of one GPU"
    if device.type == "cuda" and device.index + 1 < torch.cuda.device_count():
        other = torch.device("cuda", device.index + 1)
        if not torch.cuda.can_device_access_peer(device, other):
            yield f"{device} can't access {other} directly: messages between them go through host memory"


def _container_problems(device: torch.device) -> Iterator[str]:
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
    if device.type == "cuda" and shared < SHARED_MEMORY:
        yield str(invalid("/dev/shm", "1 GiB or more (docker run --shm-size=8g)", f"{shared / 2**20:.0f} MiB"))
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    adapters = Path("/sys/class/infiniband")
    if adapters.exists() and any(adapters.iterdir()) and memlock != resource.RLIM_INFINITY:
        expected = "no limit with InfiniBand (docker run --ulimit memlock=-1)"
        yield str(invalid("locked memory", expected, f"{memlock / 2**20:.0f} MiB"))


def _network_problems(process: Process) -> Iterator[str]:
    if process.world > process.local_world and (found := unreachable()) is not None:
        yield found
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        if os.environ.get(name) == "1":
            yield f"{name}=1: messages may take a slower path than necessary"


def _versions() -> dict[str, str]:
    versions = {
        "petra": next((found.version for found in distributions(name="petra")), "not installed"),
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
