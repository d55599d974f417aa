"""A reversible sequence against plain autograd of the same module: time, and peak memory of a training step against depth.

python -m benchmarks.reversible_sequence --out runs/reversible_sequence.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.report import alternate, machine, ratio, save, spread, table
from petra.reversible import Coupling, ReversibleSequence


def branch(channels: int) -> nn.Module:
    """F = conv-BN-ReLU-conv-BN."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
    )


def build(depth: int, channels: int, size: int, batch: int) -> tuple[ReversibleSequence, tuple[Tensor, Tensor]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x1, x2 = (t.contiguous(memory_format=torch.channels_last) for t in torch.randn(2, batch, channels, size, size))
    sequence = ReversibleSequence(Coupling(branch(channels)) for _ in range(depth))
    return sequence.to(memory_format=torch.channels_last), (x1, x2)


def step(sequence: ReversibleSequence, x: tuple[Tensor, Tensor], plain: bool) -> float:
    """Seconds of one forward and backward."""
    start = time.perf_counter()
    y = x
    if plain:
        for block in sequence.blocks:
            y = block(*y)
    else:
        y = sequence(*x)
    (y[0].mean() + y[1].square().mean()).backward()
    return time.perf_counter() - start


def peak(depth: int, plain: bool, channels: int, size: int, batch: int) -> float:
    """MiB that a step of a fresh process adds to its resident memory at the peak, gradients of parameters aside (Linux)."""
    sequence, x = build(depth, channels, size, batch)
    for p in sequence.parameters():
        p.grad = torch.zeros_like(p)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    step(sequence, x, plain)
    return (resident("VmHWM") - before) / 1024


def resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--size", type=int, default=32, help="pixels of a side")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    shape = (options.channels, options.size, options.batch)

    sequence, x = build(16, *shape)
    seconds = alternate(
        {"reversible": partial(step, sequence, x, False), "plain": partial(step, sequence, x, True)}, options.rounds
    )
    ratios = ratio(seconds["reversible"], seconds["plain"])
    print(f"16 blocks, {options.channels} channels, {options.size} pixels, batch {options.batch}, channels last, one thread\n")
    print(table({name: spread(values) for name, values in seconds.items()} | {"reversible / plain": ratios}, "s"))

    memory: dict[str, dict[str, float]] = {}
    for depth in (8, 16, 32):
        for name, plain in (("reversible", False), ("plain", True)):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                memory.setdefault(name, {})[str(depth)] = pool.apply(peak, (depth, plain, *shape))
    print("\n| peak MiB of a step | 8 blocks | 16 blocks | 32 blocks |\n|---|---|---|---|")
    for name, row in memory.items():
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in row.values()) + " |")
    save(options.out, {"machine": machine(), "shape": shape, "seconds": seconds, "ratio": ratios, "peak_mib": memory})


if __name__ == "__main__":
    main()
