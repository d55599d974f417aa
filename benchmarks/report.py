"""Shared helpers of the benchmarks: options, alternating rounds, statistics, Markdown tables, JSON, memory and the machine."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from launch.run.folder import records_in
from launch.runtime.machine import available_cores

T = TypeVar("T")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keep the line breaks of the description, and show defaults except None and False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def benchmark_parser(
    description: str | None,
    rounds: int,
    rounds_help: str = "measured rounds; each contestant runs once per round",
    images: tuple[int, int, int] | None = None,
) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have.

    Args:
        rounds: Default of ``--rounds``.
        images: Defaults of ``--channels``, ``--size`` and ``--batch``. None: there are no such options.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=_HelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=rounds_help)
    parser.add_argument("--out", help="JSON file to write")
    if images is not None:
        parser.add_argument("--channels", type=int, default=images[0], help="channels of each stream")
        parser.add_argument("--size", type=int, default=images[1], help="side of an image in pixels")
        parser.add_argument("--batch", type=int, default=images[2], help="images per microbatch")
    return parser


def cells_parser(description: str | None, names: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser with the options of benchmarks that train cells on tokens.

    Args:
        names: Names of all cells, the default of ``--cells``, which refuses others.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path, help="folder of the token files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records; or a file of them, which is only read")
    add_cells(parser, names)
    return parser


def add_cells(parser: argparse.ArgumentParser, names: Iterable[str], *, nargs: str = "+") -> None:
    """Add the option ``--cells``, which takes some of these names, and is all of them by default."""
    known = [*names]
    parser.add_argument("--cells", nargs=nargs, choices=known, default=known, metavar="NAME", help="cells to train; all by default")


def numbers(text: str) -> list[int]:
    """Return the integers of an option, which commas separate."""
    return [int(number) for number in text.split(",")]


def alternate(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run all contestants once in each of ``rounds`` rounds, and return what each returned in every round, usually seconds.

    The rounds follow one warm-up round.
    """
    for run in contestants.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            seconds[name].append(run())
    return seconds


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes once all processes have arrived."""
    dist.barrier()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_processes(count: int, measure: Callable[..., T], *arguments: object, start: str = "spawn") -> list[T]:
    """Return what ``measure(rank, *arguments)`` returns in each of ``count`` new processes, by rank.

    The processes have one thread each. Several form a gloo group. With ``start="fork"``, they begin with what this process has
    imported, which saves seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(_process, (count, folder, measure, arguments), count, start_method=start)  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(count)]


def _process(rank: int, count: int, folder: str, measure: Callable[..., object], arguments: Sequence[object]) -> None:
    torch.set_num_threads(1)
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    torch.save(measure(rank, *arguments), Path(folder, f"{rank}.pt"))
    gc.collect()  # of pipelines, whose groups of replicas must end before the default group
    if count > 1:
        dist.destroy_process_group()


def installed(build: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T], list[str]]:
    """Return what each function builds, and the names of those whose library isn't installed."""
    made: dict[str, T] = {}
    missing: list[str] = []
    for name, make in build.items():
        try:
            made[name] = make()
        except ImportError:
            missing.append(name)
    return made, missing


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return the spread of the ratios of each round. Changes of the machine's speed between rounds cancel out."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def spreads(figures: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Return the spread of each contestant in each case."""
    return {f"{case}: {name}": spread(values) for case, row in figures.items() for name, values in row.items()}


def ratios(figures: Mapping[str, Mapping[str, Sequence[float]]], over: str, under: str) -> dict[str, dict[str, float]]:
    """Return the :func:`ratio` of two contestants in each case."""
    return {case: ratio(row[over], row[under]) for case, row in figures.items()}


def best_rate(rates: Sequence[float], loss: Callable[[float], float]) -> float:
    """Return the rate with the smallest loss. While it is at an edge, the search goes on beyond by a factor of 2."""
    found, wanted = dict[float, float](), list(rates)
    while wanted:
        found |= {rate: loss(rate) for rate in wanted}
        best = min(found, key=lambda rate: found[rate])
        beyond = {min(found): min(found) / 2, max(found): max(found) * 2}
        wanted = [beyond[best]] if best in beyond else []
    return best


def show_records(options: argparse.Namespace, table: Callable[..., str], draw: Callable[..., None]) -> None:
    """Print the table of the records in ``--out``, and draw them if there is a ``--picture``."""
    found = [*records_in(options.out).values()]
    print(table(found))
    if options.picture is not None:
        draw(found, options.picture)


def table(rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Return a Markdown table of spreads."""
    lines = [f"| | min {unit} | median {unit} | max {unit} |", "|---|---|---|---|"]
    lines += [f"| {name} | {row['min']:.4g} | {row['median']:.4g} | {row['max']:.4g} |" for name, row in rows.items()]
    return "\n".join(lines)


def kept_bytes(function: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Return the bytes that the graph of a function's result saves for backward, without parameters. Shared memory counts once."""
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
    """Return processor, GPU, versions and the commit of this clone."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": cpu,
        "cores": available_cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def peak_mib(work: Callable[[], object]) -> float:
    """Return the peak resident memory that the work adds to this process, in MiB (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (VmHWM)
    before = _resident("VmRSS")
    work()
    return (_resident("VmHWM") - before) / 1024


def save(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Write the machine, the options and the figures to the JSON file ``--out``, if it is given."""
    if options.out is not None:
        path, content = Path(options.out), {"machine": machine(), "options": vars(options), **figures}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0])


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
