"""What every benchmark shares: rounds of alternating contestants, their figures, the machine, JSON and a Markdown table."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def alternate(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant, one after the other in each of ``rounds`` rounds, after one round that does not count."""
    for run in contestants.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            seconds[name].append(run())
    return seconds


def installed(build: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T], list[str]]:
    """What each makes, and the names of those whose libraries aren't there."""
    made: dict[str, T] = {}
    missing: list[str] = []
    for name, make in build.items():
        try:
            made[name] = make()
        except ImportError:
            missing.append(name)
    return made, missing


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Round by round, so that a machine whose speed drifts does not count."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def table(rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    lines = [f"| | min {unit} | median {unit} | max {unit} |", "|---|---|---|---|"]
    lines += [f"| {name} | {row['min']:.4g} | {row['median']:.4g} | {row['max']:.4g} |" for name, row in rows.items()]
    return "\n".join(lines)


def kept_bytes(function: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Bytes that the graph of a function's result saves for the backward pass, each piece of memory once, parameters aside."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    own = {p.untyped_storage()._cdata for p in parameters}
    del result
    return sum(storage.nbytes() for key, storage in kept.items() if key not in own)


def machine() -> dict[str, Any]:
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def peak_mib(work: Callable[[], object]) -> float:
    """What the work adds to this process's resident memory at its peak (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _resident("VmRSS")
    work()
    return (_resident("VmHWM") - before) / 1024


def save(path: str | None, figures: dict[str, Any]) -> None:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0])


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
