"""Compare a reversible sequence with ordinary autograd, checkpointing and other reversible libraries, on the same functions F.

python -m benchmarks.reversible_sequence --out runs/reversible_sequence.json

Measures CPU time and peak memory of a training step at each depth, after checking in float64 that all gradients are equal.
Libraries that aren't installed are listed and skipped (``pip install --no-deps revtorch revlib memcnn``).
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import alternate, benchmark_parser, installed, numbers, peak_mib, ratio, save, spread, table
from benchmarks.reversible_peers import LIBRARIES, PEERS, Forward, gradients, step


def branch(channels: int) -> nn.Module:
    """Return F: convolution, batch norm, ReLU, convolution, batch norm."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
    )


def build(depth: int, channels: int, size: int, batch: int, dtype: torch.dtype = torch.float32) -> tuple[list[nn.Module], Tensor]:
    """Return the functions of the blocks, and both streams concatenated along the first dimension."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(2 * batch, channels, size, size, dtype=dtype).contiguous(memory_format=torch.channels_last)
    branches = [branch(channels).to(dtype=dtype, memory_format=torch.channels_last) for _ in range(depth)]  # type: ignore[call-overload]
    for p in (p for f in branches for p in f.parameters()):
        p.grad = torch.zeros_like(p)
    return branches, x


def check_gradients_agree(names: Sequence[str]) -> None:
    """Check in float64 that all give the gradients of ordinary autograd."""
    branches, x = build(4, channels=8, size=8, batch=4, dtype=torch.float64)
    expected = gradients("plain autograd", branches, x)
    for name in names:
        torch.testing.assert_close(gradients(name, branches, x), expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def seconds_of(forward: Forward, x: Tensor) -> float:
    """Return the CPU time of one step, which other work of the machine changes less than its wall time."""
    start = time.process_time()
    step(forward, x)
    return time.process_time() - start


def peak(name: str, depth: int, *shape: int) -> float:
    """Return the peak resident memory that a step adds in a new process, in MiB, without gradients of parameters."""
    branches, x = build(2, channels=4, size=4, batch=1)
    step(PEERS[name](branches), x)  # exclude what the first step of a process imports
    branches, x = build(depth, *shape)
    forward = PEERS[name](branches)
    return peak_mib(lambda: step(forward, x))


def timed(names: Sequence[str], depth: int, shape: tuple[int, int, int], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step of each, in each round."""
    branches, x = build(depth, *shape)
    return alternate({name: partial(seconds_of, PEERS[name](branches), x) for name in names}, rounds)


def peaks(names: Sequence[str], depths: Sequence[int], shape: tuple[int, int, int]) -> dict[str, dict[str, float]]:
    """Return the peak memory of a step of each in MiB, by depth."""
    memory: dict[str, dict[str, float]] = {name: {} for name in names}
    for depth in depths:
        for name in names:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                memory[name][str(depth)] = pool.apply(peak, (name, depth, *shape))
    return memory


def by_depth(rows: dict[str, dict[str, float]], what: str, form: str = "{:.4g}") -> str:
    """Return a Markdown table with one column per depth. ``form`` formats the values."""
    depths = next(iter(rows.values()))
    lines = [f"| {what} | " + " | ".join(f"{depth} blocks" for depth in depths) + " |", "|---" * (len(depths) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(form.format(value) for value in row.values()) + " |" for name, row in rows.items()]
    return "\n".join(lines)


def main() -> None:
    parser = benchmark_parser(__doc__, 9, images=(64, 32, 4))
    parser.add_argument("--depths", type=numbers, default="8,16,32,64", help="numbers of blocks, which must be even")
    options = parser.parse_args()
    depths, shape = options.depths, (options.channels, options.size, options.batch)

    names, missing = installed({name: partial(_named, name) for name in PEERS})
    check_gradients_agree(list(names))
    print(f"{options.channels} channels, {options.size} pixels, batch {options.batch}, channels last, one thread")
    print("".join(f"\n{name}: not installed" for name in missing))
    figures: dict[str, Any] = {}
    medians: dict[str, dict[str, float]] = {name: {} for name in names}
    for depth in depths:
        seconds = timed(list(names), depth, shape, options.rounds)
        over = {name: ratio(seconds["petra"], seconds[name]) for name in names if name != "petra"}
        figures[str(depth)] = {"seconds": seconds, "petra_over": over}
        for name, values in seconds.items():
            medians[name][str(depth)] = statistics.median(values)
        print(f"\n{depth} blocks\n\n" + table({name: spread(values) for name, values in seconds.items()}, "s"))
        print("\ntime of petra divided by time of the other, round by round\n\n" + table(over, ""))
    memory = peaks(list(names), depths, shape)
    print("\n" + by_depth(medians, "median seconds of a step"))
    print("\n" + by_depth(memory, "peak MiB of a step"))
    libraries = [name for name in LIBRARIES if name in names]
    found = {"not_installed": missing, "libraries": libraries, "depths": figures, "median_seconds": medians, "peak_mib": memory}
    save(options, found)


def _named(name: str) -> str:
    PEERS[name](build(2, 4, 4, 1)[0])
    return name


if __name__ == "__main__":
    main()
