"""Time that plans of many stages take, and what more stages cost in one process.

python -m benchmarks.planning --out runs/planning.json --figure runs/planning.png

First the predictions and automatic choices, with stages of random cost. Then the engine with tiny blocks, one per stage: seconds
until the first round can run, memory that the pipeline adds to the process, and time per stage and microbatch in a short run. All
times are CPU time of one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from random import Random

import torch
from torch import nn

from benchmarks.overhead import FEATURES, Head, Split, coupling
from benchmarks.report import benchmark_parser, machine, peak_mib, save, spread, table
from benchmarks.two_stages import Noise
from petra import METHODS, BlockSpec, Model, Pipeline, TensorSpec
from petra.cost_model.autotune import tune
from petra.cost_model.costs import BlockCost, StageCost
from petra.cost_model.delays import choose_delays
from petra.cost_model.links import Link
from petra.cost_model.simulator import predict
from petra.plan.timetable import training_rounds
from petra.reversible import Coupling

STAGES = (10, 30, 100, 300, 1000)
K = 4


def planning(random: Random) -> dict[str, Callable[[], object]]:
    """Return the predictions and choices to time, by name."""
    link = Link(bandwidth=1000, latency=0.05)

    def costs(stages: int) -> list[StageCost]:
        return [StageCost(random.uniform(0.9, 1.1), random.uniform(2.7, 3.3), 0.3, 10, 20) for _ in range(stages)]

    blocks = [
        BlockCost(f"block{i}", True, f := random.uniform(0.5, 1.5), 3 * f, f, 2 * f, 0.1, 10, 10, 30, 100) for i in range(2000)
    ]
    large, small = costs(1000), costs(128)
    work: dict[str, Callable[[], object]] = {
        f"predict, 1,000 stages, {name}": partial(predict, large, METHODS[name], K, link=link)
        for name in ("petra", "pipedream", "backprop", "1f1b", "gpipe")
    }
    work["predict, 1,000 stages, petra, lockstep"] = partial(predict, large, METHODS["petra"], K, link=link, transport="lockstep")
    work["predict, 1,000 stages, 1f1b, k = 32"] = partial(predict, large, METHODS["1f1b"], 32, link=link)
    work["method.delay=auto, 128 stages"] = partial(choose_delays, small, METHODS["petra"], K, link=link)
    work["method.delay=auto, 1,000 stages"] = partial(choose_delays, large, METHODS["petra"], K, link=link)
    work["trainer.stages=auto, 2,000 blocks on 512 devices"] = partial(tune, blocks, METHODS["petra"], K, 512)
    return work


def damped() -> Coupling:
    """Build a tiny coupling whose function is nearly zero, so that activations of a thousand of them don't overflow."""
    block = coupling()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(1e-4)
    return block


def slow(blocks: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that hardly changes the weights."""
    return torch.optim.SGD(blocks.parameters(), lr=1e-9, momentum=0.9)


def tiny_pipeline(stages: int) -> Pipeline:
    """Build a pipeline of tiny blocks in this process and compute the first round of its timetable."""
    reversible = [BlockSpec(f"block{i}", damped) for i in range(stages - 2)]
    model = Model("tiny", (BlockSpec("split", Split), *reversible, BlockSpec("head", Head)))
    pipeline = Pipeline(model, TensorSpec((4, 2 * FEATURES), torch.float32), method="petra", k=K, optimizer=slow)
    next(iter(training_rounds(pipeline.plan.delays, pipeline.plan.boundary_delays, 0, 10**6)))
    return pipeline


def curves(microbatches: int) -> dict[int, dict[str, float]]:
    """Return the costs of each number of stages, each measured in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        return dict(zip(STAGES, pool.map(costs_of, STAGES, [microbatches] * len(STAGES)), strict=True))


def costs_of(stages: int, microbatches: int) -> dict[str, float]:
    """Return start-up CPU seconds, MiB, and microseconds per stage and microbatch."""
    torch.set_num_threads(1)
    tiny_pipeline(3)  # imports what PyTorch loads at the first use
    made: list[Pipeline] = []
    start = time.process_time()
    mib = peak_mib(lambda: made.append(tiny_pipeline(stages)))
    startup = time.process_time() - start
    data = Noise(TensorSpec((4, 2 * FEATURES), torch.float32))
    start = time.process_time()
    made[0].train(data, microbatches)
    each = (time.process_time() - start) / stages / microbatches
    return {"CPU seconds to start": startup, "MiB": mib, "µs per stage and microbatch": 1e6 * each}


def draw(found: Mapping[int, Mapping[str, float]], path: str) -> None:
    """Draw each quantity against the number of stages, with a straight line through the last point for comparison."""
    from matplotlib.figure import Figure

    names = list(found[STAGES[0]])
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names)), names, strict=True):
        values = [found[stages][name] for stages in STAGES]
        axes.plot(STAGES, values, "o-", label="measured")
        if name != names[-1]:
            axes.plot(STAGES, [values[-1] * stages / STAGES[-1] for stages in STAGES], "--", color="grey", label="proportional")
            axes.set(yscale="log")
        axes.set(xscale="log", xlabel="stages", ylabel=name, ylim=(0 if name == names[-1] else None, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = benchmark_parser(__doc__, 5, "times that each prediction and choice runs")
    parser.add_argument("--microbatches", type=int, default=20, help="microbatches of the run that measures the overhead")
    parser.add_argument("--figure", help="PNG file for the cost curves")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds = {}
    for name, work in planning(Random(0)).items():
        seconds[name] = []
        for _ in range(options.rounds):
            start = time.process_time()
            work()
            seconds[name].append(time.process_time() - start)
    print(table({name: spread(values) for name, values in seconds.items()}, "CPU s"))
    found = curves(options.microbatches)
    names = list(found[STAGES[0]])
    print("\n| stages | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    for stages, values in found.items():
        print(f"| {stages} | " + " | ".join(f"{values[name]:.3g}" for name in names) + " |")
    if options.figure:
        draw(found, options.figure)
    save(options.out, {"machine": machine(), "options": vars(options), "seconds": seconds, "curves": found})


if __name__ == "__main__":
    main()
