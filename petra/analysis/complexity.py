"""PETRA's Table 1, measured: what one stage of each method stores, sends and computes in a pipeline of equal stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from petra.analysis.flops import FlopCounter
from petra.cost_model.costs import StageCost
from petra.cost_model.simulator import predict
from petra.diagnostics.activation_memory import ActivationMemory, graph_bytes
from petra.engine.stage import Stage
from petra.hooks import Hook
from petra.method import METHODS, Keep, Method, Weights
from petra.model import BlockSpec, Model
from petra.pipeline import Pipeline
from petra.plan.overlap import overlapped_stages
from petra.reversible import Coupling
from petra.specs import Message, Streams, TensorSpec
from petra.torch_private import storage_key

BATCH, FEATURES = 8, 32


@dataclass(frozen=True)
class Variant:
    """A method on the kind of network that the paper runs it on.

    Attributes:
        reversible: Blocks are couplings of two streams; otherwise residual blocks of one stream with the same function.
        flushes: An update takes as many microbatches as there are stages; otherwise one.
    """

    method: Method
    reversible: bool = False
    flushes: bool = False

    def k(self, stages: int) -> int:
        return stages if self.flushes else 1


VARIANTS = {
    "backprop": Variant(METHODS["backprop"]),
    "reversible": Variant(METHODS["reversible"], reversible=True),
    "delayed, graphs kept": Variant(replace(METHODS["delayed"], keep=Keep.GRAPH)),
    "dsp": Variant(METHODS["dsp"]),
    "petra": Variant(METHODS["petra"], reversible=True),
    "delayed, inputs kept": Variant(METHODS["delayed"]),
    "reconstruct_stashed": Variant(METHODS["reconstruct_stashed"], reversible=True),
    "pipedream": Variant(METHODS["pipedream"]),
    "pipedream_2bw": Variant(METHODS["pipedream_2bw"], flushes=True),
    "1f1b": Variant(METHODS["1f1b"], flushes=True),
    "gpipe": Variant(METHODS["gpipe"], flushes=True),
}
"""The five rows of the paper's table, then the other methods."""


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


def measure(variant: Variant, stages: int) -> Complexity:
    """Train a pipeline of ``stages`` equal stages in one process, and measure its first stage.

    One more stage before them hands out the data and one after them computes the loss. Both have no parameters and no matrix
    products, and add no delay, so the stages between have the delays of a pipeline of J stages.

    Raises:
        ConfigError: If ``stages`` < 2: there are no messages then.
    """
    k, body = variant.k(stages), variant.method
    delay = body.delay if body.fill else (0, *body.boundary_delays(stages - 1), 0)
    inputs = TensorSpec((BATCH, (1 + variant.reversible) * FEATURES), torch.float32)
    pipeline = Pipeline(
        chain(stages, variant.reversible),
        inputs,
        method=replace(body, delay=delay),
        k=k,
        optimizer=lambda blocks: torch.optim.SGD(blocks.parameters() if [*blocks.parameters()] else [torch.zeros(1)], lr=1e-3),
    )
    microbatches = 2 * (max(pipeline.plan.delays) + k)
    first = pipeline.stages[1]
    with ExitStack() as stack:
        memory = stack.enter_context(ActivationMemory(first, weights=False).attached(pipeline.hooks))
        versions = stack.enter_context(pipeline.hooks.attached(_Versions(first)))
        messages = stack.enter_context(pipeline.hooks.attached(_Messages()))
        counter = stack.enter_context(FlopCounter())
        pipeline.train(_RandomData(inputs), microbatches)
    specs = pipeline.plan.layout.profiles[0].outputs
    parameters = sum(p.nbytes for p in first.module.parameters())
    graph = graph_bytes(pipeline.plan.model, range(1, 2), specs, [Keep.GRAPH])
    activation, forward = BATCH * FEATURES * 4, 2 * BATCH * FEATURES**2
    again = body.keep is Keep.NOTHING and body.weights is Weights.STASHED  # Reconstructs, then evaluates with other weights.
    backward = 2 if body.keep is Keep.GRAPH else 3 + again
    return Complexity(
        graphs=memory.peak / graph,
        inputs=memory.peak / sum(spec.bytes for spec in specs),
        weights=1 + versions.peak / parameters,
        forward=messages.bytes[1, 2] / microbatches / activation,
        backward=messages.bytes[2, 1] / microbatches / activation,
        flops=counter.total / microbatches / forward,
        period=predict([StageCost(1, backward)] * stages, body, k).period,
        overlapped=_overlapped_period(stages, backward, body, k),
    )


def _overlapped_period(stages: int, backward: float, method: Method, k: int) -> float:
    """Return the period with forward beside backward. The last stage does not overlap, and stores its graph: 3 units, too."""
    beside = overlapped_stages(method.boundary_delays(stages - 1)[: stages - 1])
    last = StageCost(1, 2 if beside else backward)
    return predict([*[StageCost(1, backward)] * (stages - 1), last], method, k, overlap=True).period


def chain(stages: int, reversible: bool) -> Model:
    """Return a model of equal blocks, between a block without parameters that splits the data and one that computes the scores."""
    body = _coupling if reversible else Residual
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


def _coupling() -> nn.Module:
    return Coupling(_branch())


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
        if stage == self.stage.index:
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
