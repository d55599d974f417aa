"""Measure the time of exact streams, and the reconstruction error of exact streams, plain streams and a bf16 wire.

python -m benchmarks.exact_streams --out runs/exact_streams.json
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.report import alternate, benchmark_parser, machine, ratio, save, spread, table
from benchmarks.reversible_sequence import branch, by_depth
from petra.reversible import Coupling, Grid, ReversibleSequence, frozen_statistics, normalisations

Pair = tuple[Tensor, Tensor]


def build(depth: int, channels: int, size: int, batch: int, exact: bool) -> tuple[ReversibleSequence, Pair]:
    """Return a sequence of reversible blocks and an input."""
    torch.manual_seed(0)
    x1, x2 = (t.contiguous(memory_format=torch.channels_last) for t in torch.randn(2, batch, channels, size, size))
    sequence = ReversibleSequence((Coupling(branch(channels)) for _ in range(depth)), grid=Grid() if exact else None)
    return sequence.to(memory_format=torch.channels_last), (x1, x2)


def step(sequence: ReversibleSequence, x: Pair) -> float:
    """Return the seconds of one forward and backward."""
    start = time.perf_counter()
    y1, y2 = sequence(*x)
    (y1.mean() + y2.square().mean()).backward()
    return time.perf_counter() - start


@torch.no_grad()
def error(sequence: ReversibleSequence, x: Pair, autocast: bool, wire: torch.dtype | None) -> float:
    """Return |x̃ − x| / |x|, where x̃ is reconstructed through all blocks. The output is first rounded to the type ``wire``."""
    if sequence.grid is not None:
        x = (sequence.grid.round(x[0]), sequence.grid.round(x[1]))
    y = x
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), frozen_statistics(normalisations(sequence)):
        for block in sequence.blocks:
            y = block(*y)
        if wire is not None:
            y = (y[0].to(wire).float(), y[1].to(wire).float())
        for block in reversed(list(sequence.blocks)):
            y = block.inverse(*y)  # type: ignore[operator]
    return float((torch.stack(y) - torch.stack(x)).norm() / torch.stack(x).norm())


def errors_by_depth(depths: Sequence[int], shape: tuple[int, int, int]) -> dict[str, dict[str, float]]:
    """Return the reconstruction error of each variant and precision, by number of blocks."""
    errors: dict[str, dict[str, float]] = {}
    for depth in depths:
        for precision, autocast in (("float32", False), ("bf16 autocast", True)):
            for name, exact, wire in (
                ("exact streams", True, None),
                ("plain streams", False, None),
                ("plain streams, bf16 wire", False, torch.bfloat16),
            ):
                value = error(*build(depth, *shape, exact=exact), autocast, wire)
                errors.setdefault(f"{name}, {precision}", {})[str(depth)] = value
    return errors


def main() -> None:
    parser = benchmark_parser(__doc__, 9)
    parser.add_argument("--depth", type=int, default=16, help="number of reversible blocks")
    parser.add_argument("--channels", type=int, default=64, help="channels of each stream")
    parser.add_argument("--size", type=int, default=32, help="side of an image in pixels")
    parser.add_argument("--batch", type=int, default=16, help="images per microbatch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = (options.channels, options.size, options.batch)
    built = {name: build(options.depth, *shape, exact=exact) for name, exact in (("exact streams", True), ("plain streams", False))}

    seconds = alternate({name: partial(step, *pair) for name, pair in built.items()}, options.rounds)
    ratios = ratio(seconds["exact streams"], seconds["plain streams"])
    print(f"{options.depth} blocks, {options.channels} channels, {options.size} pixels, batch {options.batch}, one thread\n")
    print(table({name: spread(values) for name, values in seconds.items()} | {"exact / plain": ratios}, "s"))

    errors = errors_by_depth([depth for depth in (1, 4, 16, 64) if depth <= 4 * options.depth], shape)
    print("\n" + by_depth(errors, "relative reconstruction error", "{:.2g}"))
    save(options.out, {"machine": machine(), "shape": shape, "seconds": seconds, "ratio": ratios, "errors": errors})


if __name__ == "__main__":
    main()
