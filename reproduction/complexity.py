"""PETRA's Table 1: what one stage of each method stores, sends and computes in a pipeline of equal stages, at either scale."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from launch.runtime.terminal import table
from petra import Recipe
from petra.cost_model.costs import StageCost
from petra.cost_model.simulator import predict
from petra.cost_model.stage_memory import count_stage
from petra.engine.stage import Stage
from petra.hooks import Hook
from petra.method import METHODS, Keep, Method
from petra.model import BlockSpec, Model
from petra.pipeline import Pipeline
from petra.reversible import Coupling
from petra.specs import Message, Streams, TensorSpec
from petra.torch_private import storage_key
from reproduction.stored_memory import ActivationMemory

from .checkpointing import FlopCounter
from .paper import TABLE1
from .report import Report, Request

BATCH, FEATURES = 8, 32
STAGES = (2, 4, 8, 16)
QUANTITIES = (
    ("graphs", "Activations that the first stage stores between forward and backward, in graphs of a stage", 0),
    ("inputs", "The same activations in inputs of a stage", 1),
    ("weights", "Versions of the first stage's parameters", 2),
    ("forward", "Message from the first stage to the second, in activations of a residual block", None),
    ("backward", "Message from the second stage to the first, in activations of a residual block", 3),
    ("flops", "Compute of all stages for one microbatch, in forwards of one stage", 4),
    (
        "period",
        "Simulated time per microbatch in the steady state if each stage alternates forward and backward, in forwards of one stage",
        5,
    ),
    ("overlapped", "The same if stages whose next boundary has d >= 2 run forward beside backward", 5),
)
"""Attribute of a measurement, title of its table, and column in the paper's table."""


VARIANTS: dict[str, tuple[Method, bool]] = {
    "backprop": (METHODS["backprop"], False),
    "reversible": (METHODS["reversible"], True),
    "delayed, graphs kept": (replace(METHODS["delayed"], keep=Keep.GRAPH), False),
    "dsp": (METHODS["dsp"], False),
    "petra": (METHODS["petra"], True),
}
"""The rows of the paper's table: method, and whether blocks are couplings; otherwise they are residual blocks with the same F."""


@dataclass(frozen=True)
class Complexity:
    """Costs of the first of J equal stages. ``flops`` and ``period`` are those of all stages for one microbatch.

    Attributes:
        graphs: Largest number of activations stored between forward and backward, in graphs of a stage.
        inputs: The same number in inputs of a stage.
        weights: Largest number of versions of the parameters, the current one included.
        forward: Size of a message to the second stage, in activations of a residual block.
        backward: Size of a message from the second stage, in the same unit.
        flops: Work of all stages, in forwards of one stage.
        period: Simulated time of a microbatch in the steady state, in forwards of one stage. Messages take no time.
        overlapped: The same if stages run forward beside backward where they can.
    """

    graphs: float
    inputs: float
    weights: float
    forward: float
    backward: float
    flops: float
    period: float
    overlapped: float


def table1(request: Request) -> Report:
    """Measure the cost of the methods on equal stages, trained in one process (PETRA, Table 1)."""
    found = {name: {j: measure(*variant, j) for j in STAGES} for name, variant in VARIANTS.items()}
    parts = []
    for key, title, column in QUANTITIES:
        lines = [
            [
                name,
                TABLE1[name][column] if column is not None and name in TABLE1 else "",
                *(f"{getattr(by_stages[j], key):.3g}" for j in STAGES),
            ]
            for name, by_stages in found.items()
        ]
        parts.append(f"{title}:\n\n" + table(("method", "paper", *(f"J = {j}" for j in STAGES)), lines))
    parts.append(
        "`reversible` and `petra` run couplings of two streams, the other methods residual blocks of one stream, all with the same "
        "F. k is 1. Stored activations are counted at the end of a forward, so the current microbatch is included: 2(J − 1) + 1 "
        "for the first stage, where the paper's formula 2(J − j) gives 2(J − 1). The paper's mean time assumes that a stage runs "
        "forward and backward at the same time."
    )
    return Report("\n".join(parts) + "\n", {name: {j: asdict(by_stages[j]) for j in STAGES} for name, by_stages in found.items()})


def measure(method: Method, reversible: bool, stages: int) -> Complexity:
    """Train a pipeline of ``stages`` equal stages in one process, and measure its first stage.

    One more stage before them hands out the data and one after them computes the loss. Both have no parameters and no matrix
    products, and add no delay, so the stages between have the delays of a pipeline of J stages.

    Raises:
        ConfigError: If ``stages`` < 2: there are no messages then.
    """
    inputs = TensorSpec((BATCH, (1 + reversible) * FEATURES), torch.float32)
    pipeline = Pipeline(
        chain(stages, reversible),
        inputs,
        Recipe(lambda blocks: torch.optim.SGD(blocks.parameters() if [*blocks.parameters()] else [torch.zeros(1)], lr=1e-3)),
        method=replace(method, delay=(0, *method.boundary_delays(stages - 1), 0)),
    )
    microbatches = 2 * (max(pipeline.plan.delays) + 1)
    first = pipeline.stages[1]
    pipeline.train(_RandomData(inputs), 1)  # a pipeline's first microbatch is also checked
    with ExitStack() as stack:
        memory = stack.enter_context(ActivationMemory(pipeline, weights=False).attached())
        versions = stack.enter_context(pipeline.hooks.attached(_Versions(first)))
        messages = stack.enter_context(pipeline.hooks.attached(_Messages()))
        counter = stack.enter_context(FlopCounter())
        pipeline.train(_RandomData(inputs), microbatches)
    plan, parameters = pipeline.plan.stages[1], sum(p.nbytes for p in first.module.parameters())
    activation, forward = BATCH * FEATURES * 4, 2 * BATCH * FEATURES**2
    backward = 2 if method.keep is Keep.GRAPH else 3
    return Complexity(
        graphs=memory.peaks[1] / count_stage(pipeline.plan.model, replace(plan, keeps=(Keep.GRAPH,))).stored,
        inputs=memory.peaks[1] / sum(spec.bytes for spec in plan.inputs),
        weights=1 + versions.peak / parameters,
        forward=messages.bytes[1, 2] / microbatches / activation,
        backward=messages.bytes[2, 1] / microbatches / activation,
        flops=counter.total / microbatches / forward,
        period=predict([StageCost(1, backward)] * stages, method).period,
        overlapped=_overlapped_period(stages, backward, method),
    )


def _overlapped_period(stages: int, backward: float, method: Method) -> float:
    """Return the period with forward beside backward: that of the backward. The last stage stores its graph: 1 + 2 units, too."""
    # At d >= 2, the backward of a round needs a message that was sent before the forward of the round before.
    beside = any(d >= 2 for d in method.boundary_delays(stages - 1))
    return max(3.0, backward) if beside else predict([StageCost(1, backward)] * stages, method).period


def chain(stages: int, reversible: bool) -> Model:
    """Return a model of equal blocks, between a block without parameters that splits the data and one that computes the scores."""
    body = (lambda: Coupling(_branch())) if reversible else Residual
    return Model(
        "chain",
        (
            BlockSpec("data", partial(Split, 1 + reversible)),
            *(BlockSpec(f"block{j}", body) for j in range(stages)),
            BlockSpec("loss", Total),
        ),
    )


class Split(nn.Module):
    """Split (B, n · C) into n streams of (B, C)."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in x.chunk(self.streams, dim=1))


class Residual(nn.Module):
    """Residual block x + F(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.f = _branch()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)  # type: ignore[no-any-return]


class Total(nn.Module):
    """Sum of all streams, as class scores."""

    def forward(self, *x: Tensor) -> Tensor:
        return torch.stack(x).sum(0)


def _branch() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False), nn.Tanh())


class _RandomData:
    """Random inputs and targets of a microbatch."""

    def __init__(self, inputs: TensorSpec) -> None:
        self.spec = inputs

    def inputs(self, m: int) -> Tensor:
        return torch.randn(self.spec.shape, generator=torch.Generator().manual_seed(m))

    def targets(self, m: int) -> Tensor:
        return torch.arange(m, m + BATCH) % FEATURES


class _Versions(Hook):
    """Measure the largest number of bytes of copied weights that a stage stores at the end of a forward."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.peak = stage, 0

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        if stage == 1:
            copies = {storage_key(t): t.nbytes for stash in _stashes(self.stage) for t in stash.values()}
            self.peak = max(self.peak, sum(copies.values()))


class _Messages(Hook):
    """Sum the bytes of the messages from stage to stage, without the reports of loss and metrics."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[int, int], int] = {}

    def send_end(self, stage: int, peer: int, m: int, message: Message) -> None:
        size = sum(t.nbytes for part in message[:2] for t in part)
        self.bytes[stage, peer] = self.bytes.get((stage, peer), 0) + size


def _stashes(stage: Stage) -> Iterator[dict[str, Tensor]]:
    for runner in stage.runners:
        yield from (version for version in runner.versions.stashed.values() if version is not None)
        if runner.versions.previous is not None:
            yield runner.versions.previous
