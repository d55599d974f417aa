"""Compare casting weights once per update with casting them in every evaluation, under bf16 autocast on the CPU.

python -m benchmarks.cast_once --out runs/cast_once.json

Each contestant runs forward and backward of k microbatches of one stage, as between two updates. CPU time of one thread, so that
other work of the machine has little effect. ``--processes 2`` measures in two processes side by side, as in a pipeline, which share
caches and memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from benchmarks.report import alternate, benchmark_parser, machine, ratios, save, spreads, table
from petra import Keep
from petra.engine.stage import Stage
from petra.models import revgpt, revnet18
from petra.process_memory import keep_freed_memory

STAGES = {
    "RevNet-18, block 3, 64 images": (partial(revnet18, 10), 2, (64, 64, 32, 32)),
    "RevNet-18, block 3, 8 images": (partial(revnet18, 10), 2, (8, 64, 32, 32)),
    "RevNet-18, block 9, 64 images": (partial(revnet18, 10), 8, (64, 512, 4, 4)),
    "RevNet-18, block 9, 8 images": (partial(revnet18, 10), 8, (8, 512, 4, 4)),
    "GPT, 256 channels, 1 x 256 tokens": (partial(revgpt, dim=256, heads=4), 1, (1, 256, 256)),
    "GPT, 256 channels, 8 x 256 tokens": (partial(revgpt, dim=256, heads=4), 1, (8, 256, 256)),
    "GPT, 768 channels, 1 x 256 tokens": (partial(revgpt, dim=768, heads=12), 1, (1, 256, 768)),
}
"""Model, index of the block from 0, and shape of each of its two streams."""


def seconds(stage: Stage, shape: Sequence[int]) -> float:
    """Return the CPU time per microbatch of k forwards and backwards after an update."""
    k = stage.k
    pairs = [tuple(torch.randn(*shape) for _ in range(2)) for _ in range(2)]
    with stage.updating():
        pass
    start = time.process_time()
    for m in range(k):
        y = stage.forward(m, pairs[0])
        stage.backward(m, y, pairs[1])
    return (time.process_time() - start) / k


def build(name: str, k: int, cast_once: bool) -> Stage:
    """Return a stage of one of :data:`STAGES`."""
    model, index, _ = STAGES[name]
    block = model().build_block(index, seed=0).train()
    return Stage([block], [Keep.NOTHING], first_block=index, k=k, autocast=torch.bfloat16, cast_once=cast_once)


Figures = dict[str, dict[str, list[float]]]
"""Seconds of each round by stage and contestant."""


def measure(k: int, rounds: int) -> Figures:
    """Measure all stages in this process."""
    torch.set_num_threads(1)
    keep_freed_memory()
    figures = {}
    for name, (_, _, shape) in STAGES.items():
        stages = {kind: build(name, k, kind == "once") for kind in ("every evaluation", "once")}
        figures[name] = alternate({kind: partial(seconds, stage, shape) for kind, stage in stages.items()}, rounds)
    return figures


def measure_in(processes: int, k: int, rounds: int) -> Figures:
    """Measure all stages in several processes at the same time, and return the rounds of all."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        parts = [future.result() for future in [pool.submit(measure, k, rounds) for _ in range(processes)]]
    return {name: {kind: [s for part in parts for s in part[name][kind]] for kind in kinds} for name, kinds in parts[0].items()}


def main() -> None:
    parser = benchmark_parser(__doc__, 9)
    parser.add_argument("--k", type=int, default=8, help="microbatches per update")
    parser.add_argument("--processes", type=int, default=1, help="processes that measure at the same time")
    options = parser.parse_args()
    figures = measure_in(options.processes, options.k, options.rounds)
    gain = ratios(figures, "once", "every evaluation")
    print(f"Forward and backward of one reversible block, k = {options.k}, {options.processes} process(es) of one thread\n")
    print(table(spreads(figures), "s of CPU time"))
    print("\nOnce over every evaluation, round by round:\n\n" + table(gain, ""))
    save(options.out, {"machine": machine(), "options": vars(options), "figures": figures, "gain": gain})


if __name__ == "__main__":
    main()
