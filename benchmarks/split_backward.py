"""Compare a backward pass in two parts with a whole one, on stages of reversible blocks.

python -m benchmarks.split_backward --out runs/split_backward.json

Both are measured in CPU time of this process, so that other work of the machine has little effect.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from benchmarks.report import alternate, benchmark_parser, machine, ratios, save, spreads, table
from benchmarks.two_stages import coupling
from petra import Keep
from petra.engine.stage import Stage
from petra.process_memory import keep_freed_memory

SIZES = {"16 channels, 32×32": (16, 32, 64), "64 channels, 32×32": (64, 32, 16), "256 channels, 8×8": (256, 8, 16)}
"""Channels, side of the images in pixels, and images per microbatch."""
PRECISIONS = {"float32": None, "bf16": torch.bfloat16}


def seconds(stage: Stage, channels: int, size: int, batch: int, *, second_part: bool = True) -> float:
    """Return the CPU time of one backward pass, with or without the second part if it is split."""
    shape = (batch, channels, size, size)
    y, dy = (tuple(torch.randn(shape).contiguous(memory_format=torch.channels_last) for _ in range(2)) for _ in range(2))
    start = time.process_time()
    stage.backward(0, y, dy)
    first = time.process_time() - start
    if stage.split:
        stage.backward_weights(0)
    return time.process_time() - start if second_part else first


def main() -> None:
    parser = benchmark_parser(__doc__, 15)
    parser.add_argument("--blocks", type=int, default=2, help="reversible blocks of the stage")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    figures = {}
    for name, sizes in SIZES.items():
        for precision, autocast in PRECISIONS.items():
            stages = {
                split: Stage(
                    [coupling(sizes[0]).to(memory_format=torch.channels_last) for _ in range(options.blocks)],  # type: ignore[call-overload]
                    [Keep.NOTHING] * options.blocks,
                    first_block=1, autocast=autocast, channels_last=True, split=split,
                )
                for split in (False, True)
            }  # fmt: skip
            for stage in stages.values():  # decides whether blocks can be split
                stage.forward(1, tuple(torch.randn(2, 1, sizes[0], sizes[1], sizes[1])))
            contestants = {
                "whole": partial(seconds, stages[False], *sizes),
                "two parts": partial(seconds, stages[True], *sizes),
                "first part": partial(seconds, stages[True], *sizes, second_part=False),
            }
            figures[f"{name}, {precision}"] = alternate(contestants, options.rounds)
    cost = ratios(figures, "two parts", "whole")
    first = ratios(figures, "first part", "whole")
    print(f"Backward of {options.blocks} reversible blocks, one thread\n\n" + table(spreads(figures), "s of CPU time"))
    print("\nTwo parts over whole, round by round:\n\n" + table(cost, ""))
    print("\nFirst part over whole, round by round:\n\n" + table(first, ""))
    save(options.out, {"machine": machine(), "options": vars(options), "figures": figures, "two_parts": cost, "first_part": first})


if __name__ == "__main__":
    main()
