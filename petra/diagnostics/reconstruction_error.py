"""How far reconstructed inputs are from the true ones, watched while a pipeline trains.

A reversible block that holds nothing gets its input back from its output. Two things keep that from being exact: sums of floating
point round (RevNet, section 3.2), and under an asynchronous method the weights are no longer those of the forward (PETRA, section
3.1). Both errors add up from block to block towards the data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from petra.diagnostics.replacing import replace_method
from petra.engine.block import BlockRunner
from petra.errors import ConfigError
from petra.method import Keep
from petra.pipeline import Pipeline
from petra.reversible import Gradients
from petra.specs import Streams

EVERY = 200
"""Microbatches from one look to the next: of one of them each stage keeps one sample of its input from F to B."""


class DriftWatch:
    """Warns, once for each stage of this process, of a reconstructed input that is too far from the true one.

    Every :data:`EVERY` microbatches the first sample of what enters a chain of blocks that hold nothing is compared with what their
    backwards make of their output: ‖x̃ − x‖ / ‖x‖ over both streams. Training stays as it is, to the last bit. The host waits
    for the device at these moments only.

    Args:
        limit: relative error above which there is a warning.

    Attributes:
        errors: for each stage (from 0) with such blocks, the error at its last look, the largest of its chains.

    Raises:
        ConfigError: a limit that isn't above 0.
    """

    def __init__(self, pipeline: Pipeline, limit: float) -> None:
        if not limit > 0:
            raise ConfigError(f"trainer.drift: found {limit}, accepted are null or numbers > 0")
        self.pipeline, self.limit = pipeline, limit
        self.errors: dict[int, float] = {}
        self._told: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches what the pipeline trains inside."""
        with ExitStack() as undo:
            for j, stage in self.pipeline.stages.items():
                before = None
                for runner in stage.runners:
                    if runner.keep is Keep.NOTHING and before is not Keep.NOTHING:
                        self._watch(undo, j, runner)
                    before = runner.keep
            yield

    def _watch(self, undo: ExitStack, j: int, runner: BlockRunner) -> None:
        """Of a chain's first block, whose input is the last to be reconstructed."""
        forward, backward = runner.forward, runner.backward
        kept: dict[int, Streams] = {}

        def watched_forward(m: int, x: Streams) -> Streams:
            if (m + 1) % EVERY == 0:
                kept[m] = tuple(t[:1].clone() for t in x)
            return forward(m, x)

        def watched_backward(m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
            found = backward(m, y, dy)
            if m in kept:
                self._compare(j, m, found[0], kept.pop(m))
            return found

        replace_method(undo, runner, "forward", watched_forward)
        replace_method(undo, runner, "backward", watched_backward)

    def _compare(self, j: int, m: int, rebuilt: Streams, true: Streams) -> None:
        difference = [a[:1].double() - b.double() for a, b in zip(rebuilt, true, strict=True)]
        error = (_norm(difference) / _norm(true)).item()
        self.errors[j] = error
        if error > self.limit and j not in self._told:
            self._told.add(j)
            print(f"warning: {self._text(j, m, error)}", file=sys.stderr, flush=True)

    def _text(self, j: int, m: int, error: float) -> str:
        pipeline = self.pipeline
        late = pipeline.plan.method.staleness(pipeline.plan.delays[j], pipeline.plan.k)
        helps = ["a smaller optim.lr, a larger k or a smaller method.delay"] if late else []
        helps += ["trainer.precision=float32"] if pipeline.plan.numerics.autocast is not None else []
        helps += ["trainer.wire=float32"] if pipeline.plan.numerics.wire is not None else []
        exact = pipeline.plan.numerics.exact_streams or pipeline.plan.numerics.wire is not None
        helps += [] if exact else ["trainer.exact_streams=true"]
        helps += ["method.keep=input"]
        return (
            f"stage {j + 1}, microbatch {m}: the input that it reconstructs is {error:.2g} of its norm away from the true one, "
            f"which is more than trainer.drift={self.limit:g}; what helps is {', or '.join(helps)}"
        )


def _norm(streams: Streams | list[Tensor]) -> Tensor:
    return torch.stack([t.double().square().sum() for t in streams]).sum().sqrt()
