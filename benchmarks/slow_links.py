"""Measure pipelines over links as homes have them, beside predictions: ``python -m benchmarks.slow_links --out RUN.json``.

Eight processes, each in a network namespace of this machine, are a pipeline of eight stages, or two replicas of four. Each boundary
has a link of its own, and each stage one to its counterpart in the other replica. A link limits each direction to ``--rate`` and
delays it by ``--delay``: a process carries its packets between two TUN devices (``benchmarks/namespaces.py``). Needs root.

Stages do not compute: they sleep for a fourth of ``--seconds`` in a forward, and for the rest in a backward that evaluates the
function again, each time within 10 %. They send streams of ``--width`` numbers per token. So the cores need not be free, but
processes that use them delay packets. By default, a microbatch has an eighth of the 4,096 tokens that take 0.38 s, because eight
processes with messages of 268 MB need more memory than small machines have.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.namespaces import Shape, shaped_network
from benchmarks.report import benchmark_parser, machine, save
from launch.bench.contestants import period
from launch.runtime.terminal import command
from petra import METHODS, BlockSpec, Keep, Model, Numerics, OuterStep, Pipeline, Recipe, Runtime, TensorSpec
from petra.cost_model.costs import StageCost
from petra.cost_model.machines import Link
from petra.cost_model.replicas import seconds_per_update
from petra.cost_model.simulator import predict
from petra.diagnostics.process_memory import keep_freed_memory
from petra.distributed import all_gather_objects
from petra.reversible import Coupling

HOSTS = 8
PORT = "29577"


@dataclass(frozen=True)
class Contestant:
    """What is measured.

    Attributes:
        method: Name of the method.
        width: Numbers of each stream per token; None for ``--width``.
        message_format, gradient_format: As for :class:`petra.Numerics`.
        dp: Number of replicas.
        parameters: Parameters of a stage, which replicas sum.
        outer: Outer steps of replicas; None to sum gradients at every update.
        compute: Times that a stage needs for a microbatch, in forwards; less than 4 if it stores its graph.
    """

    method: str = "petra"
    width: int | None = None
    message_format: str | None = None
    gradient_format: str | None = None
    dp: int = 1
    parameters: int = 0
    outer: OuterStep | None = None
    compute: int = 4


P, INT8 = 1 << 22, ("int8_token", "int8_token")
"""Parameters of a stage with replicas, and formats with a scale for each token."""
CONTESTANTS = {
    "petra": Contestant(),
    "petra, bf16": Contestant(message_format="bf16"),
    "petra, int8": Contestant("petra", None, *INT8),
    "dsp": Contestant("dsp"),
    "dsp, bf16": Contestant("dsp", message_format="bf16"),
    "dsp, int8": Contestant("dsp", None, *INT8),
    "1f1b": Contestant("1f1b", compute=3),
    "petra, streams of 128, bf16": Contestant(width=128, message_format="bf16"),
    "dsp, streams of 128, bf16": Contestant("dsp", width=128, message_format="bf16"),
    "petra, streams of 128, int8": Contestant("petra", 128, *INT8),
    "dsp, streams of 128, int8": Contestant("dsp", 128, *INT8),
    "two replicas, sums at every update": Contestant(width=8, dp=2, parameters=P),
    "two replicas, every 8 updates, int8": Contestant(
        width=8, dp=2, parameters=P, outer=OuterStep(8, overlap=4, mixing=0.5, format="int8", staggered=True)
    ),
}
"""What is compared. ``width=8`` makes messages so small that only sums over replicas need the links."""


class Sleep(torch.autograd.Function):
    """Identity that takes some seconds in forward, and twice as many in backward, within 10 %."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds * random.uniform(0.9, 1.1))
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds * random.uniform(0.9, 1.1))
        return gradients[0], None


class Device(nn.Module):
    """Function of a reversible block that another device computes."""

    def __init__(self, width: int, seconds: float, parameters: int) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(parameters))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale + self.weight[:1].sum() if len(self.weight) else self.scale
        return Sleep.apply(scale * x, self.seconds)  # type: ignore[no-any-return, no-untyped-call]


class Enter(nn.Module):
    """Two streams of some width from one number per token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.repeat(1, self.width), x.repeat(1, self.width)


class Leave(nn.Module):
    """Two outputs per token."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.scale * (x1[:, :2] + x2[:, :2])


class Ones:
    """Microbatches of ones."""

    def __init__(self, tokens: int) -> None:
        self._x, self._y = torch.ones(tokens, 1), torch.zeros(tokens, dtype=torch.int64)

    def inputs(self, m: int) -> Tensor:
        return self._x

    def targets(self, m: int) -> Tensor:
        return self._y


def made(contestant: Contestant, options: argparse.Namespace) -> tuple[Pipeline, Ones]:
    """Return this process's part of a pipeline, and its data."""
    stages, unit = HOSTS // contestant.dp, options.seconds / 4
    width = options.width if contestant.width is None else contestant.width
    device = partial(Device, width, unit, contestant.parameters)
    blocks = [BlockSpec(f"device{j}", partial(_coupling, device)) for j in range(stages)]
    model = Model("asleep", (BlockSpec("enter", partial(Enter, width)), *blocks, BlockSpec("leave", Leave)))
    tokens = options.tokens * contestant.dp
    extensions = [] if contestant.outer is None else [contestant.outer]
    pipeline = Pipeline(
        model,
        TensorSpec((tokens, 1), torch.float32),
        Recipe(_sgd, metrics={}, extensions=extensions),
        method=contestant.method,
        k=options.k,
        dp=contestant.dp,
        stages=[2, *[1] * (stages - 2), 2],
        numerics=Numerics(message_format=contestant.message_format, gradient_format=contestant.gradient_format),
        runtime=Runtime(transport="edge"),
    )
    return pipeline, Ones(tokens)


def _coupling(device: Any) -> Coupling:
    return Coupling(device())


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the measured seconds per microbatch of each contestant, and the bytes of its messages. Every process calls this."""
    keep_freed_memory()
    found: dict[str, Any] = {}
    for name in options.only:
        pipeline, data = made(CONTESTANTS[name], options)
        plan, k = pipeline.plan, options.k
        least = 1 if plan.layout.dp == 1 else 4 if CONTESTANTS[name].outer is None else 16
        updates = max(least, -(-options.microbatches // k))
        dist.barrier()
        begun = time.perf_counter()
        seconds = max(all_gather_objects(period(pipeline, data, updates * k + plan.delays[0] + 1)))
        boundary = plan.boundaries[0]
        found[name] = {
            "measured": seconds,
            "forward_bytes": boundary.forward_bytes,
            "backward_bytes": boundary.backward_bytes,
            "run": time.perf_counter() - begun,
        }
        if dist.get_rank() == 0:
            print(name, found[name], file=sys.stderr, flush=True)
        del pipeline
    return found


def predicted(contestant: Contestant, row: dict[str, Any], options: argparse.Namespace) -> float:
    """Return the predicted seconds per microbatch from the settings alone."""
    stages, unit, method = HOSTS // contestant.dp, options.seconds / 4, METHODS[contestant.method]
    backward = unit * (2 if method.keep is Keep.GRAPH else 3)
    cost = StageCost(unit, backward, 0.0, row["forward_bytes"], row["backward_bytes"])
    first, last = replace(cost, backward_bytes=0), replace(cost, forward_bytes=0, backward=2 * unit)
    costs = [first, *[cost] * (stages - 2), last]
    link = Link(options.rate * 1e6 / 8, options.delay / 1e3) if options.rate else Link()
    before = predict(costs, method, options.k, link=link, transport="edge").period
    outer = contestant.outer or OuterStep()
    update = seconds_per_update(contestant.parameters, contestant.dp, link, outer, options.k * before)
    return predict([replace(each, update=update) for each in costs], method, options.k, link=link, transport="edge").period


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Run all processes over shaped links, and return the figures of rank 0."""
    pairs = [(i, i + 1) for i in range(HOSTS - 1)] + [(i, i + HOSTS // 2) for i in range(HOSTS // 2)]
    shape = Shape(options.rate * 1e6 / 8, options.delay / 1e3)
    with tempfile.TemporaryDirectory() as folder, shaped_network(HOSTS, pairs if options.rate else [], shape) as (hosts, address):
        path, processes = Path(folder, "figures.json"), []
        for rank, host in enumerate(hosts):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(HOSTS), "MASTER_ADDR": address, "MASTER_PORT": PORT}
            variables |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            words = ["ip", "netns", "exec", host, sys.executable, "-m", "benchmarks.slow_links", "--process", str(path), *arguments]
            processes.append(subprocess.Popen(words, env=os.environ | variables))
        try:
            if [process.wait() for process in processes] != [0] * HOSTS:
                sys.exit("error: a process failed")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return dict(json.loads(path.read_text()))


@command
def main(arguments: list[str] | None = None) -> None:
    """Measure, or be one of the processes."""
    parser = benchmark_parser(__doc__, 1)
    parser.add_argument("--rate", type=float, default=80.0, help="megabits per second of each direction; 0: no limit and no delay")
    parser.add_argument("--delay", type=float, default=30.0, help="milliseconds in each direction")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a microbatch")
    parser.add_argument("--seconds", type=float, default=0.0475, help="seconds that a stage takes for a microbatch")
    parser.add_argument("--width", type=int, default=4096, help="numbers of each stream per token")
    parser.add_argument("--k", type=int, default=16, help="microbatches per update")
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches of each measurement, after the pipeline is full")
    parser.add_argument("--only", nargs="*", default=[*CONTESTANTS], choices=CONTESTANTS, metavar="NAME", help="contestants")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    if options.process:
        dist.init_process_group("gloo")
        found = measure(options)
        if dist.get_rank() == 0:
            Path(options.process).write_text(json.dumps(found))
        dist.destroy_process_group()
        return
    found = run(options, given)
    print(f"{options.rate:g} Mb/s and {options.delay:g} ms in each direction, {machine()['cpu']}\n")
    columns = ("", "MB forward", "MB backward", "s per microbatch", "predicted", "predicted / measured", "share of the speed")
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
    for name, row in found.items():
        contestant = CONTESTANTS[name]
        row["predicted"] = predicted(contestant, row, options)
        full = options.seconds / 4 * contestant.compute
        sizes = f"{row['forward_bytes'] / 1e6:.2f} | {row['backward_bytes'] / 1e6:.2f}"
        times = f"{row['measured']:.3f} | {row['predicted']:.3f} | {row['predicted'] / row['measured']:.2f}"
        print(f"| {name} | {sizes} | {times} | {full / row['measured']:.1%} |")
    save(options, {"figures": found})


if __name__ == "__main__":
    main()
