"""Measure PETRA's speed-up and efficiency on two balanced reversible stages in two processes.

The speed-up is relative to the same processes taking turns. The efficiency is the compute time of the slower stage divided by the
period.

python -m benchmarks.two_stages --out runs/two_stages.json
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.report import benchmark_parser, in_processes, ratio, save, spread, table
from benchmarks.reversible_sequence import branch
from launch.bench.contestants import period
from petra import BlockSpec, Keep, Method, Model, Pipeline, Recipe, TensorSpec
from petra.diagnostics.process_memory import keep_freed_memory
from petra.reversible import Coupling
from petra.settings import Numerics, Runtime, TransportName

METHODS: dict[str, tuple[Method, TransportName]] = {
    "petra, d = 2, lockstep": (Method("petra", 2, Keep.NOTHING), "lockstep"),
    "petra, d = 2, edge": (Method("petra", 2, Keep.NOTHING), "edge"),
    "petra, d = 1, edge": (Method("petra", 1, Keep.NOTHING), "edge"),
    "reversible, d = 0": (Method("reversible", 0, Keep.NOTHING), "edge"),
}


class Split(nn.Module):
    """Split data with twice the channels into two streams. The cost is negligible."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = x.chunk(2, dim=1)
        return x1.contiguous(), x2.contiguous()


class Head(nn.Module):
    """Linear classifier of both streams, averaged over the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * channels, 10)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.linear(torch.cat([x1, x2], 1).mean((2, 3)))


class Zeros:
    """Microbatches of tokens 0, of one form."""

    def __init__(self, form: TensorSpec) -> None:
        rows, tokens = form.shape
        self.inputs = lambda m: torch.zeros(rows, tokens, dtype=form.dtype)
        self.targets = lambda m: torch.zeros(rows * tokens, dtype=form.dtype)


class Noise:
    """One microbatch of noise, repeated.

    Args:
        spec: Form of the inputs. Integers are from 0 to 255.
        targets: Number of targets; None for one per sample.
    """

    def __init__(self, spec: TensorSpec, targets: int | None = None) -> None:
        self._x = torch.randn(spec.shape) if spec.dtype.is_floating_point else torch.randint(256, spec.shape)
        self._y = torch.randint(10, (spec.shape[0] if targets is None else targets,))

    def inputs(self, m: int) -> Tensor:
        return self._x

    def targets(self, m: int) -> Tensor:
        return self._y


def build(options: argparse.Namespace) -> tuple[Model, TensorSpec, list[int]]:
    """Return the model, its inputs, and the number of blocks in each of the two stages."""
    block = partial(coupling, options.channels)
    reversible = [BlockSpec(f"block{i}", block) for i in range(2 * options.blocks)]
    model = Model("balanced", (BlockSpec("split", Split), *reversible, BlockSpec("head", partial(Head, options.channels))))
    inputs = TensorSpec((options.batch, 2 * options.channels, options.size, options.size), torch.float32)
    return model, inputs, [options.blocks + 1, options.blocks + 1]


def make_pipeline(
    model: Model, inputs: TensorSpec, stages: list[int], k: int, method: Method, transport: TransportName
) -> Pipeline:
    """Return the stage of this process in a pipeline of two processes."""
    return Pipeline(
        model,
        inputs,
        Recipe(sgd),
        method=method,
        stages=stages,
        runtime=Runtime(transport=transport),
        k=k,
        numerics=Numerics(channels_last=True),
    )


def coupling(channels: int) -> Coupling:
    """Return a reversible block."""
    return Coupling(branch(channels))


def measure(rank: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the period of every method and the compute time of this process's stage in each round."""
    keep_freed_memory()
    model, inputs, stages = build(options)
    data = Noise(inputs)
    make = partial(make_pipeline, model, inputs, stages, options.k)
    pipelines = {name: make(method, transport) for name, (method, transport) in METHODS.items()}
    bare = make(METHODS["petra, d = 2, lockstep"][0], "auto")
    figures: dict[str, list[float]] = {name: [] for name in [*METHODS, "compute"]}
    for round_ in range(options.rounds + 1):
        row = {name: period(pipeline, data, options.microbatches) for name, pipeline in pipelines.items()}
        dist.barrier()
        row["compute"] = compute(bare, data, rank, options.microbatches // options.k * options.k)
        if round_ > 0:
            for name, seconds in row.items():
                figures[name].append(seconds)
    return figures


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all contestants."""
    return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, nesterov=True, fused=True)


def compute(pipeline: Pipeline, data: Noise, rank: int, microbatches: int) -> float:
    """Return the seconds per microbatch of this stage's forward, backward and share of the update, in a loop without messages.

    Both processes run this at the same time, so they share caches and memory as in the pipeline.
    """
    worker = pipeline.workers[rank]
    stage = worker.stage
    x1, x2 = (t.contiguous(memory_format=torch.channels_last) for t in torch.randn(2, *_stream_shape(pipeline)))
    x = (data.inputs(0),) if rank == 0 else (x1, x2)
    start = time.perf_counter()
    for m in range(microbatches):
        y = stage.forward(m, x)
        stage.backward(m, y, tuple(torch.ones_like(t) for t in y))
        if (m + 1) % stage.gradients.k == 0:
            worker.update(m + 1)
    return (time.perf_counter() - start) / microbatches


def _stream_shape(pipeline: Pipeline) -> tuple[int, ...]:
    return pipeline.plan.layout.profiles[0].outputs[0].shape


def main() -> None:
    parser = benchmark_parser(__doc__, 25, images=(64, 8, 16))
    parser.add_argument("--blocks", type=int, default=8, help="reversible blocks per stage")
    parser.add_argument("--k", type=int, default=4, help="microbatches per update")
    parser.add_argument("--microbatches", type=int, default=15, help="microbatches of one round of one method")
    options = parser.parse_args()

    figures = in_processes(2, measure, options)
    periods = {name: figures[0][name] for name in METHODS}
    slower = [max(pair) for pair in zip(figures[0]["compute"], figures[1]["compute"], strict=True)]
    speedups = {name: ratio(periods["reversible, d = 0"], periods[name]) for name in METHODS if name != "reversible, d = 0"}
    efficiencies = {name: ratio(slower, periods[name]) for name in METHODS if name != "reversible, d = 0"}
    print(f"Two stages of {options.blocks} blocks, {options.channels} channels, {options.size} pixels, batch {options.batch}\n")
    rows = {name: spread(values) for name, values in periods.items()}
    print(table(rows | {f"compute, stage {r + 1}": spread(figures[r]["compute"]) for r in range(2)}, "s per microbatch"))
    print("\nSpeed-up over taking turns:\n\n" + table(speedups, ""))
    print("\nEfficiency (compute time of the slower stage divided by the period):\n\n" + table(efficiencies, ""))
    save(options, {"figures": figures, "speedup": speedups, "efficiency": efficiencies})


if __name__ == "__main__":
    main()
