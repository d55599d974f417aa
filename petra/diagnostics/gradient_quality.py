"""How good a method's gradients are while it trains: against the delayed, the end-to-end and the stored-activation gradient."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petra.diagnostics.replacing import replace_method
from petra.engine.block import BlockRunner
from petra.engine.stage import Stage
from petra.engine.weights import WeightVersion
from petra.errors import ConfigError
from petra.method import Weights
from petra.pipeline import Pipeline
from petra.reversible import Gradients
from petra.specs import Streams

Flat = Tensor
"""A stage's gradient as one float64 vector."""


@dataclass
class _Case:
    """One diagnosed microbatch on its way."""

    inputs: dict[int, Streams] = field(default_factory=dict)
    """Of each stage, as its F took them."""
    weights: dict[int, list[WeightVersion | None]] = field(default_factory=dict)
    """Of each stage at its F, a copy for each block."""
    delayed: dict[int, Flat] = field(default_factory=dict)
    end_to_end: dict[int, Flat] = field(default_factory=dict)


class GradientDiagnosis:
    """Compares, every ``every`` microbatches, each stage's gradient with those that it stands for (PETRA, Fig. 5 and 6).

    All are of the same microbatch and of the stage's parameters, with the same random numbers; running statistics stay as they are.

    * *end-to-end*: plain backpropagation through all stages with the weights of the moment when the microbatch
      meets its loss;
    * *delayed*: plain backpropagation where each stage has the weights of its F (inputs and weights kept: Zhuang et al. 2020);
    * *stored*: the stage's B with the δ that it got, but its input kept from F instead of reconstructed (RevNet, Fig. 4; with
      d = 0 that is the whole network's true gradient).

    Rows are appended to a file of JSON lines, one for each stage and diagnosed microbatch:

    * ``microbatch``, ``stage`` (from 1);
    * ``cosine_end_to_end``, ``norm_ratio_end_to_end`` (the method's over the other), the same for ``delayed``, and
      ``cosine_delayed_end_to_end`` between these two: what staleness alone does;
    * ``angle_stored`` in degrees; ``reconstruction_error``: ‖x̃ − x‖ / ‖x‖ of the stage's input.

    A stage of one :class:`petra.reversible.Coupling` has angle 0: its F reads the stream that needs no reconstruction.

    A diagnosed microbatch costs three backpropagations and holds copies of all weights; training is undisturbed, to the last bit.

    Raises:
        ConfigError: stages in other processes, or ``every`` < 1.
    """

    def __init__(self, pipeline: Pipeline, every: int, path: Path | None = None) -> None:
        if every < 1:
            raise ConfigError(f"trainer.diagnose: found {every}, accepted are null or integers >= 1")
        if pipeline.world > 1:
            raise ConfigError(
                f"trainer.diagnose: found {every} in {pipeline.world} processes, accepted is null; it needs one process"
            )
        if pipeline.concurrency > 1:
            raise ConfigError(f"trainer.diagnose: found {every} with stages that run at the same time, accepted is concurrency=1")
        self.pipeline, self.every, self.path = pipeline, every, path
        self.rows: list[dict[str, float]] = []
        self._cases: dict[int, _Case] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Diagnoses what the pipeline trains inside."""
        with ExitStack() as undo:
            for j, stage in self.pipeline.stages.items():
                self._watch(undo, j, stage)
            yield

    def _watch(self, undo: ExitStack, j: int, stage: Stage) -> None:
        forward, backward = stage.forward, stage.backward

        def watched_forward(m: int, x: Streams) -> Streams:
            if m % self.every == 0:
                case = self._cases.setdefault(m, _Case())
                case.inputs[j] = tuple(t.clone() for t in x)
                case.weights[j] = [_copies(runner, m) for runner in stage.runners]
            return forward(m, x)

        def watched_backward(m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams]:
            if m % self.every:
                return backward(m, y, dy)
            if not self._cases[m].delayed:
                self._references(m)
            stored = self._stored(m, j, dy)
            with ExitStack() as notes:
                found, rebuilt = _note(notes, stage.runners)
                result = backward(m, y, dy)
            scale = self.pipeline.workers[j].update.scale
            gradient = _flat(stage, found)
            self._compare(m, j, gradient if scale is None else gradient / scale, rebuilt[0], stored)
            return result

        replace_method(undo, stage, "forward", watched_forward)
        replace_method(undo, stage, "backward", watched_backward)

    def _compare(self, m: int, j: int, gradient: Flat, rebuilt: Streams, stored: Flat) -> None:
        case = self._cases[m]
        delayed, end_to_end = case.delayed[j], case.end_to_end[j]
        row: dict[str, float] = {"microbatch": m, "stage": j + 1}
        if len(gradient):
            for name, other in (("end_to_end", end_to_end), ("delayed", delayed)):
                row[f"cosine_{name}"] = math.cos(angle(gradient, other))
                row[f"norm_ratio_{name}"] = float(gradient.norm() / other.norm())
            row["cosine_delayed_end_to_end"] = math.cos(angle(delayed, end_to_end))
            row["angle_stored"] = math.degrees(angle(gradient, stored))
        error = sum(float((a - b).double().square().sum()) for a, b in zip(rebuilt, case.inputs[j], strict=True))
        row["reconstruction_error"] = math.sqrt(error / sum(float(t.double().square().sum()) for t in case.inputs[j]))
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if j == 0:
            del self._cases[m]

    def _stored(self, m: int, j: int, dy: Streams) -> Flat:
        case, stage = self._cases[m], self.pipeline.stages[j]
        stashed = self.pipeline.plan.method.weights is not Weights.CURRENT
        weights = case.weights[j] if stashed else [runner.versions.corrected for runner in stage.runners]
        y = stage.replay(m, case.inputs[j], weights)
        return _differentiated(y, dy, _leaves(stage, weights))

    def _references(self, m: int) -> None:
        """The two gradients that microbatch m is judged by, for all stages at once: m has reached the last stage's B."""
        case, stages = self._cases[m], self.pipeline.stages
        current: dict[int, list[WeightVersion | None]] = {j: [None] * len(stage.runners) for j, stage in stages.items()}
        case.end_to_end, case.delayed = (self._backpropagated(m, weights) for weights in (current, case.weights))

    def _backpropagated(self, m: int, weights: Mapping[int, Sequence[WeightVersion | None]]) -> dict[int, Flat]:
        stages = self.pipeline.stages
        x = self._cases[m].inputs[0]
        for j, stage in stages.items():
            x = stage.replay(m, x, weights[j])
        with torch.enable_grad():
            loss = self.pipeline.objective.loss_of(m, x[0])
        leaves = {j: _leaves(stage, weights[j]) for j, stage in stages.items()}
        every = [leaf for group in leaves.values() for leaf in group]
        found = iter(torch.autograd.grad(loss, every, allow_unused=True)) if every else iter(())
        return {j: _joined(group, [next(found) for _ in group]) for j, group in leaves.items()}


def angle(a: Tensor, b: Tensor) -> float:
    """Between two vectors, in radians; exact for small angles too, where the arc cosine isn't (Kahan 2006, section 12)."""
    a, b = a / a.norm(), b / b.norm()
    return 2 * math.atan2(float((a - b).norm()), float((a + b).norm()))


def _copies(runner: BlockRunner, m: int) -> WeightVersion:
    """Of the weights that F of microbatch m uses."""
    weights: Mapping[str, Tensor] = runner.versions.for_forward(m) or runner.parameters
    return {name: weights[name].detach().clone().requires_grad_() for name in runner.parameters}


def _leaves(stage: Stage, weights: Sequence[WeightVersion | None]) -> list[Tensor]:
    """The stage's parameters, or what stands for them, in one order."""
    pairs = zip(stage.runners, weights, strict=True)
    return [p if own is None else own[name] for runner, own in pairs for name, p in runner.parameters.items()]


def _note(undo: ExitStack, runners: Sequence[BlockRunner]) -> tuple[Gradients, list[Streams]]:
    """Fills what it returns as the runners go backward: their gradients, and the input of the first."""
    gradients: Gradients = {}
    rebuilt: list[Streams] = []
    for runner in runners:
        backward = runner.backward

        def noted(m: int, y: Streams, dy: Streams, backward: Any = backward) -> Any:
            found = backward(m, y, dy)
            gradients.update(found[2])
            rebuilt[:] = [found[0]]
            return found

        replace_method(undo, runner, "backward", noted)
    return gradients, rebuilt


def _differentiated(y: Streams, dy: Streams, leaves: Sequence[Tensor]) -> Flat:
    connected = [(a, d) for a, d in zip(y, dy, strict=True) if a.requires_grad]
    if not connected or not leaves:
        return _joined(leaves, [None] * len(leaves))
    outputs, gradients = zip(*connected, strict=True)
    return _joined(leaves, torch.autograd.grad(outputs, leaves, gradients, allow_unused=True))


def _flat(stage: Stage, gradients: Gradients) -> Flat:
    parameters = [p for runner in stage.runners for p in runner.parameters.values()]
    return _joined(parameters, [gradients.get(p) for p in parameters])


def _joined(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Flat:
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, gradients, strict=True)]
    return torch.cat([part.detach().double().flatten() for part in parts]) if parts else torch.zeros(0, dtype=torch.float64)
