"""Measure the engine's overhead: PETRA in one process, compared with a bare loop that makes the same calls on tiny blocks.

The bare loop passes one microbatch after the other through all blocks. A second one, with stages, makes the same calls in the
order of PETRA's timetable, with messages in queues: an engine that does nothing else would take as long.

python -m benchmarks.overhead --out runs/overhead.json --watched

``--watched`` adds what ``petra train`` attaches to every run, and what a key attaches, each alone. ``--parts`` shows where the
overhead goes: the engine without one of its parts each.

``--clock cpu`` measures CPU time, which depends less on other work on the machine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.report import alternate, benchmark_parser, save, spread, table
from benchmarks.two_stages import Noise, Split, sgd
from petra import BlockSpec, Hook, Model, Pipeline, Plan, Recipe, TensorSpec
from petra.diagnostics.reconstruction_error import ReconstructionMonitor
from petra.diagnostics.recorder import StageTimes
from petra.diagnostics.weight_drift import WeightDrift, distance
from petra.engine.block_function import BlockFunction
from petra.engine.endpoints import LossPort
from petra.engine.options.finite_check import FiniteCheck
from petra.engine.options.watchdog import Watchdog
from petra.engine.stage import Stage
from petra.engine.update import GradientNorm
from petra.plan.timetable import Op, Step, training_rounds
from petra.reversible import Coupling
from petra.reversible import coupling as coupling_module
from petra.reversible.replay import NOTHING

FEATURES = 8


class Head(nn.Module):
    """Linear classifier of both streams."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * FEATURES, 10)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.linear(torch.cat([x1, x2], 1))


def coupling() -> Coupling:
    return Coupling(nn.Linear(FEATURES, FEATURES))


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def attached(build: Callable[[], Pipeline], hook: Callable[[Pipeline], Hook]) -> Pipeline:
    """Return a pipeline with a hook."""
    pipeline = build()
    pipeline.hooks.append(hook(pipeline))
    return pipeline


def watched(build: Callable[[], Pipeline], data: Noise, microbatches: int) -> dict[str, Callable[[], object]]:
    """Return runs of the engine with one addition each. The first three are those of every ``petra train``."""
    hooks: dict[str, Callable[[Pipeline], Hook]] = {
        "reconstruction warning": ReconstructionMonitor,
        "watchdog": lambda pipeline: Watchdog(pipeline.workers, 0),
        "drift (trainer.stage_metrics)": lambda pipeline: WeightDrift(pipeline, distance(pipeline.plan.k, 10)),
        "times (trainer.stage_metrics)": StageTimes,
    }
    found = {name: partial(attached(build, hook).train, data, microbatches) for name, hook in hooks.items()}
    return {**found, "stop on Ctrl-C": partial(build().train, data, microbatches, stop=lambda: False)}


PARTS = {
    "norm of the gradient": [(GradientNorm, "run", lambda *_: None)],
    "norm and finite check": [(GradientNorm, "run", lambda *_: None), (FiniteCheck, "run", lambda *_: None)],
    "report and metrics": [(LossPort, "_report", lambda *_: torch.zeros(3, dtype=torch.float64))],
    "memory format": [(Stage, "contiguous", lambda _, streams: streams)],
    "check of in-place changes": [(coupling_module, "version_counter", lambda _: 0)],
    "context of repeated forwards": [(BlockFunction, "to_be_repeated", lambda _: NOTHING)],
}
"""Replacements for parts of the engine, which leave them out."""


def without(replacements: list[tuple[Any, str, Any]], run: Callable[[], object]) -> None:
    """Run without some parts of the engine."""
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        run()


def timed(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds of a run."""
    start = clock()
    run()
    return clock() - start


Pair = tuple[Tensor, ...]


def differentiated(block: Coupling, own: list[Any], y: Pair, dy: Pair, k: int) -> tuple[Pair, Pair]:
    """Return the input of a coupling and the gradient with respect to it, and add the gradients of its parameters to ``own``."""
    x2 = y[0].detach().requires_grad_()
    f = block.f(x2)
    x1 = y[1].detach() - f.detach()
    dx2, *found = torch.autograd.grad(f, [x2, *block.f.parameters()], dy[1])
    torch._foreach_add_(own, found, alpha=1 / k)
    return (x1, y[0]), (dy[1], dy[0] + dx2)


def of_loss(head: nn.Module, own: list[Any], y: Pair, targets: Tensor, k: int) -> tuple[Pair, Pair]:
    """Return what :func:`differentiated` returns, for the loss of the head's output."""
    y = tuple(t.requires_grad_() for t in y)
    *dy, dw, db = torch.autograd.grad(F.cross_entropy(head(*y), targets), [*y, *head.parameters()])
    torch._foreach_add_(own, [dw, db], alpha=1 / k)
    return y, tuple(dy)


def bare(blocks: list[nn.Module], optimizers: list[torch.optim.Optimizer], k: int, data: Noise, microbatches: int) -> None:
    """Loop over microbatches with the same evaluations, gradients, sums and steps as the engine."""
    first, *couplings, last = blocks
    gradients = [[p.grad for p in block.parameters()] for block in blocks]
    for m in range(microbatches):
        with torch.no_grad():
            y = first(data.inputs(m))
            for block in couplings:
                y = block(*y)
        y, dy = of_loss(last, gradients[-1], y, data.targets(m), k)
        for block, own in zip(reversed(couplings), reversed(gradients[1:-1]), strict=True):
            y, dy = differentiated(block, own, y, dy, k)
        if (m + 1) % k == 0:
            for optimizer in optimizers:
                optimizer.step()
            for own in gradients[1:]:
                torch._foreach_zero_(own)


class Stages:
    """The stages of the bare loop, with messages in queues, and without anything else that an engine does.

    Args:
        blocks: One for each stage.
        optimizers: That of each stage but the first.
    """

    def __init__(self, blocks: list[nn.Module], optimizers: list[torch.optim.Optimizer], k: int, data: Noise) -> None:
        self.blocks, self.optimizers, self.k, self.data = blocks, [None, *optimizers], k, data
        self.gradients = [[p.grad for p in block.parameters()] for block in blocks]
        self.down, self.up = ([deque[Any]() for _ in blocks] for _ in range(2))
        self.done = [0] * len(blocks)

    def forward(self, j: int, m: int) -> None:
        with torch.no_grad():
            y = self.blocks[j](*self.down[j].popleft() if j else (self.data.inputs(m),))
        self.down[j + 1].append(y)

    def loss(self, j: int, m: int) -> None:
        y = self.down[j].popleft()
        self.up[j].append(of_loss(self.blocks[j], self.gradients[j], y, self.data.targets(m), self.k))

    def backward(self, j: int, m: int) -> None:
        y, dy = self.up[j].popleft()
        if 0 < j < len(self.blocks) - 1:
            y, dy = differentiated(self.blocks[j], self.gradients[j], y, dy, self.k)
        if j:
            self.up[j - 1].append((y, dy))
        self.done[j] += 1
        if j and self.done[j] % self.k == 0:
            self.optimizers[j].step()
            torch._foreach_zero_(self.gradients[j])

    def run(self, plan: Plan, microbatches: int) -> None:
        """Train in the order of the plan's timetable."""
        self.done = [0] * len(self.blocks)
        last = len(self.blocks) - 1

        def bound(steps: list[Step]) -> list[tuple[Callable[[int, int], None], int, int]]:
            forwards = {j: self.loss if j == last else self.forward for j in range(last + 1)}
            return [(forwards[s.stage] if s.op is Op.FORWARD else self.backward, s.stage, s.microbatch) for s in steps]

        rounds = training_rounds(plan.delays, plan.boundary_delays, 0, microbatches)
        for offset, steps in rounds.converted(bound):
            for step, j, m in steps:
                step(j, m + offset)


def main() -> None:
    parser = benchmark_parser(__doc__, 9)
    parser.add_argument("--stages", type=int, default=10, help="number of stages, with one block each")
    parser.add_argument("--k", type=int, default=4, help="microbatches per update")
    parser.add_argument("--microbatches", type=int, default=400, help="microbatches of one round of one contestant")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="time to measure")
    parser.add_argument("--watched", action="store_true", help="also measure what petra train attaches")
    parser.add_argument("--parts", action="store_true", help="also measure the engine without one of its parts each")
    options = parser.parse_args()
    parts = PARTS.items() if options.parts else ()

    torch.set_num_threads(1)
    inputs = TensorSpec((4, 2 * FEATURES), torch.float32)
    data = Noise(inputs)
    reversible = [BlockSpec(f"block{i}", coupling) for i in range(options.stages - 2)]
    model = Model("tiny", (BlockSpec("split", Split), *reversible, BlockSpec("head", Head)))
    build = partial(Pipeline, model, inputs, Recipe(sgd), method="petra", k=options.k)
    other, clock = build(), CLOCKS[options.clock]
    blocks = [block for stage in other.stages.values() for block in stage.module]
    optimizers = [w.update.optimizer for w in other.workers.values() if w.update.optimizer is not None]
    stages = Stages(blocks, optimizers, options.k, data)
    runs: dict[str, Callable[[], object]] = {
        "engine": partial(build().train, data, options.microbatches),
        "bare loop": partial(bare, blocks, optimizers, options.k, data, options.microbatches),
        "bare loop in stages": partial(stages.run, other.plan, options.microbatches),
        **{f"without {name}": partial(without, each, partial(build().train, data, options.microbatches)) for name, each in parts},
        **(watched(build, data, options.microbatches) if options.watched else {}),
    }
    seconds = alternate({name: partial(timed, run, clock) for name, run in runs.items()}, options.rounds)
    each = {name: [1e6 * s / options.microbatches / options.stages for s in values] for name, values in seconds.items()}
    own = {name: "bare loop" if name in ("engine", "bare loop in stages") else "engine" for name in each if name != "bare loop"}
    added = {name: [a - b for a, b in zip(each[name], each[base], strict=True)] for name, base in own.items()}
    print(f"{options.stages} stages, k = {options.k}, time per stage and microbatch\n")
    rows = {f"{name} − {own[name]}": spread(values) for name, values in added.items()}
    print(table({**{name: spread(values) for name, values in each.items()}, **rows}, "µs"))
    save(options, {"microseconds": each, "overhead": spread(added["engine"])})


if __name__ == "__main__":
    main()
