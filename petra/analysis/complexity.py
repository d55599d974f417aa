"""PETRA's Table 1, measured: what one stage of a method holds, sends and computes, in a line of equal stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from petra.analysis.flops import FlopMeter
from petra.cost_model.costs import StageCost
from petra.cost_model.simulator import predict
from petra.diagnostics.activation_memory import HeldMeter, graph_bytes
from petra.diagnostics.replacing import replace_method
from petra.engine.stage import Stage
from petra.method import METHODS, Keep, Method, Weights
from petra.model import BlockSpec, Model
from petra.pipeline import Pipeline
from petra.reversible import Coupling
from petra.specs import TensorSpec

BATCH, FEATURES = 8, 32


@dataclass(frozen=True)
class Contestant:
    """A method on the kind of network that the paper gives it.

    Attributes:
        reversible: couplings of two streams; otherwise residual blocks of one stream, with the same F.
        flushes: an update has as many microbatches as there are stages; otherwise one.
    """

    method: Method
    reversible: bool = False
    flushes: bool = False

    def k(self, stages: int) -> int:
        return stages if self.flushes else 1


CONTESTANTS = {
    "backprop": Contestant(METHODS["backprop"]),
    "reversible": Contestant(METHODS["reversible"], reversible=True),
    "delayed, graphs kept": Contestant(replace(METHODS["delayed"], keep=Keep.GRAPH)),
    "dsp": Contestant(METHODS["dsp"]),
    "petra": Contestant(METHODS["petra"], reversible=True),
    "delayed, inputs kept": Contestant(METHODS["delayed"]),
    "reconstruct_stashed": Contestant(METHODS["reconstruct_stashed"], reversible=True),
    "pipedream": Contestant(METHODS["pipedream"]),
    "pipedream_2bw": Contestant(METHODS["pipedream_2bw"], flushes=True),
    "1f1b": Contestant(METHODS["1f1b"], flushes=True),
    "gpipe": Contestant(METHODS["gpipe"], flushes=True),
}
"""The five rows of the paper's table, then the other methods."""


@dataclass(frozen=True)
class Complexity:
    """Of the first of J equal stages, for one microbatch, but ``flops`` and ``period``, which are the line's.

    Attributes:
        graphs: activations held between F and B at most, in graphs of a stage.
        inputs: the same in inputs of a stage.
        weights: versions of the parameters held at most, the current one included.
        forward, backward: messages to the second stage and from it, in activations of a residual block.
        flops: of all stages, in forwards of one stage.
        period: time of a microbatch in the steady state by the simulator, in forwards of one stage; messages are free.
    """

    graphs: float
    inputs: float
    weights: float
    forward: float
    backward: float
    flops: float
    period: float


def measure(contestant: Contestant, stages: int) -> Complexity:
    """Trains a line of ``stages`` equal stages in one process and watches it.

    A stage in front hands out the data and one behind takes the loss, both without parameters or products of matrices. They delay
    nothing, so the stages between have the delays of a line of J.

    Raises:
        ConfigError: fewer than two stages, between which there are no messages.
    """
    k, body = contestant.k(stages), contestant.method
    delay = body.delay if body.fill else (0, *body.boundary_delays(stages - 1), 0)
    inputs = TensorSpec((BATCH, (1 + contestant.reversible) * FEATURES), torch.float32)
    pipeline = Pipeline(
        chain(stages, contestant.reversible),
        inputs,
        method=replace(body, delay=delay),
        k=k,
        optimizer=lambda blocks: torch.optim.SGD(blocks.parameters() if [*blocks.parameters()] else [torch.zeros(1)], lr=1e-3),
    )
    microbatches = 2 * (max(pipeline.delays) + k)
    first, versions, sent = pipeline.stages[1], [0], [0, 0]
    with ExitStack() as undo:
        meter = undo.enter_context(_Activations(first).watching())
        _watch_versions(undo, first, versions)
        _watch_messages(undo, pipeline.workers[1].downstream, sent, 0)
        _watch_messages(undo, pipeline.workers[2].upstream, sent, 1)
        counter = undo.enter_context(FlopMeter())
        pipeline.train(_Numbers(inputs), microbatches)
    specs = pipeline.layout.profiles[0].outputs
    parameters = sum(p.nbytes for p in first.module.parameters())
    graph = graph_bytes(pipeline.model, range(1, 2), specs, [Keep.GRAPH])
    activation, forward = BATCH * FEATURES * 4, 2 * BATCH * FEATURES**2
    again = body.keep is Keep.NOTHING and body.weights is Weights.STASHED  # reconstructs, then evaluates with other weights
    backward = 2 if body.keep is Keep.GRAPH else 3 + again
    return Complexity(
        graphs=meter.peak / graph,
        inputs=meter.peak / sum(spec.bytes for spec in specs),
        weights=1 + versions[0] / parameters,
        forward=sent[0] / microbatches / activation,
        backward=sent[1] / microbatches / activation,
        flops=counter.total / microbatches / forward,
        period=predict([StageCost(1, backward)] * stages, body, k).period,
    )


def chain(stages: int, reversible: bool) -> Model:
    """Equal blocks between a block without parameters that hands out the data and one that takes the loss."""
    body = _coupling if reversible else Residual
    return Model(
        "chain",
        (
            BlockSpec("data", partial(Streams, 1 + reversible)),
            *(BlockSpec(f"block{j}", body) for j in range(stages)),
            BlockSpec("loss", Total),
        ),
    )


class Streams(nn.Module):
    """(B, n · C) → n streams of (B, C)."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in x.chunk(self.streams, dim=1))


class Residual(nn.Module):
    """x → x + F(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.f = _branch()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)  # type: ignore[no-any-return]


class Total(nn.Module):
    """The sum of all streams, as scores of classes."""

    def forward(self, *x: Tensor) -> Tensor:
        return torch.stack(x).sum(0)


def _branch() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False), nn.Tanh())


def _coupling() -> nn.Module:
    return Coupling(_branch())


class _Activations(HeldMeter):
    def bytes(self, *, weights: bool = False) -> int:
        return super().bytes(weights=weights)


class _Numbers:
    """Random inputs and targets of a microbatch."""

    def __init__(self, inputs: TensorSpec) -> None:
        self.spec = inputs

    def inputs(self, m: int) -> Tensor:
        return torch.randn(self.spec.shape, generator=torch.Generator().manual_seed(m))

    def targets(self, m: int) -> Tensor:
        return torch.arange(m, m + BATCH) % FEATURES


def _watch_versions(undo: ExitStack, stage: Stage, found: list[int]) -> None:
    """Keeps in ``found[0]`` the most bytes of weights held beside the parameters at the end of a forward."""
    forward = stage.forward

    def watched(m: int, x: Any) -> Any:
        y = forward(m, x)
        copies = {t.untyped_storage()._cdata: t.nbytes for stash in _stashes(stage) for t in stash.values()}
        found[0] = max(found[0], sum(copies.values()))
        return y

    replace_method(undo, stage, "forward", watched)


def _stashes(stage: Stage) -> Iterator[dict[str, Tensor]]:
    for runner in stage.runners:
        yield from (held.weights for held in runner.held.values() if held.weights is not None)
        if runner.previous is not None:
            yield runner.previous


def _watch_messages(undo: ExitStack, port: Any, found: list[int], direction: int) -> None:
    """Adds to ``found`` the bytes of what a port sends, without the report of loss and metrics."""
    send = port.send

    def watched(m: int, message: Any) -> None:
        found[direction] += sum(t.nbytes for part in message[:2] for t in part)
        send(m, message)

    replace_method(undo, port, "send", watched)
