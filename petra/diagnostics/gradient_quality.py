"""Compares a method's gradients, while it trains, with delayed, end-to-end and stored-activation gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from petra.engine.checks import CheckedFunction
from petra.engine.options.loss_scale import LossScale
from petra.engine.options.staging import reading
from petra.engine.stage import Stage
from petra.engine.weights import WeightVersion
from petra.errors import require
from petra.hooks import Gradients, Hook
from petra.method import Weights
from petra.pipeline import Pipeline
from petra.specs import Streams, without_side

Flat = Tensor
"""A stage's gradient as one float64 vector."""


@dataclass
class _Case:
    """State of one compared microbatch; the keys are stages."""

    inputs: dict[int, Streams] = field(default_factory=dict)
    """Inputs of the forwards."""
    weights: dict[int, list[WeightVersion | None]] = field(default_factory=dict)
    """Weights of the forwards, one copy for each block."""
    delayed: dict[int, Flat] = field(default_factory=dict)
    end_to_end: dict[int, Flat] = field(default_factory=dict)
    stored: dict[int, Flat] = field(default_factory=dict)
    found: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """The method's gradients of the stage that runs its backward."""
    rebuilt: dict[int, Streams] = field(default_factory=dict)
    """Inputs that the backwards stored or reconstructed."""


class GradientQuality(Hook):
    """Compare each stage's gradient with three references, every ``every`` microbatches (PETRA, Fig. 5 and 6).

    All gradients are of the same microbatch and of the stage's parameters, with the same random numbers. Running statistics do not
    change. The references are:

    * *end-to-end*: plain backpropagation through all stages, with the weights at the time when the microbatch reaches its loss;
    * *delayed*: plain backpropagation where each stage has the weights of its forward (inputs and weights stored: Zhuang et al.
      2020);
    * *stored*: the stage's backward with the δ that it received, but with the stored input of its forward instead of the
      reconstructed one (RevNet, Fig. 4; with d = 0 this is the whole network's true gradient).

    Each stage and compared microbatch gives a row with the entries

    * ``microbatch``, ``stage`` (from 1);
    * ``cosine_end_to_end``; ``norm_ratio_end_to_end``, the norm of the method's gradient over the norm of the reference; the same
      for ``delayed``; ``cosine_delayed_end_to_end`` between these two references, which is the effect of staleness alone;
    * ``angle_stored`` in degrees; ``reconstruction_error``: ‖x̃ − x‖ / ‖x‖ of the stage's input.

    A stage of one :class:`petra.reversible.Coupling` has angle 0: its function reads the stream that needs no reconstruction.

    A compared microbatch costs three backpropagations and stores copies of all weights. The training result does not change by a
    bit.

    Args:
        log: Receives the rows.

    Raises:
        ConfigError: If ``every`` < 1 or other processes own stages.
    """

    def __init__(self, pipeline: Pipeline, every: int, log: Callable[[dict[str, float]], None]) -> None:
        require(every >= 1, "trainer.diagnose", "null or an integer >= 1", every)
        require(pipeline.world == 1, "trainer.diagnose", "null in several processes", f"{every} in {pipeline.world} processes")
        self.pipeline, self.every, self.log = pipeline, every, log
        self._cases: dict[int, _Case] = {}

    def forward_begin(self, stage: int, m: int, x: Streams) -> None:
        if m % self.every == 0:
            case = self._cases.setdefault(m, _Case())
            case.inputs[stage] = tuple(t.clone() for t in x)
            for runner in self.pipeline.stages[stage].runners:
                used: Mapping[str, Tensor] = runner.versions.for_forward(m) or runner.parameters
                copies = {name: used[name].detach().clone().requires_grad_() for name in runner.parameters}
                case.weights.setdefault(stage, []).append(copies)

    def backward_begin(self, stage: int, m: int, y: Streams, dy: Streams) -> None:
        if m % self.every == 0:
            case = self._cases[m]
            if not case.delayed:  # the last stage's backward comes first
                stages = self.pipeline.stages.items()
                case.end_to_end = self._backpropagated(m, {j: [None] * len(stage.runners) for j, stage in stages})
                case.delayed = self._backpropagated(m, case.weights)
            case.stored[stage] = self._stored(m, stage, dy)

    def block_backward_end(self, stage: int, block: int, m: int, x: Streams, gradients: Gradients) -> None:
        if m % self.every == 0:
            self._cases[m].found.update(gradients)
            self._cases[m].rebuilt[stage] = x  # The stage's first block comes last.

    def backward_end(self, stage: int, m: int, x: Streams, dx: Streams) -> None:
        if m % self.every:
            return
        self.log(self._row(m, stage))
        self._cases[m].found.clear()
        if stage == 0:
            del self._cases[m]

    def _row(self, m: int, j: int) -> dict[str, float]:
        case, scale = self._cases[m], self.pipeline.workers[j].update.part(LossScale)
        parameters = [p for runner in self.pipeline.stages[j].runners for p in runner.parameters.values()]
        gradient = _joined(parameters, [case.found.get(p) for p in parameters])
        if scale is not None:
            gradient = gradient / scale.scale
        delayed, end_to_end = case.delayed[j], case.end_to_end[j]
        row: dict[str, float] = {"microbatch": m, "stage": j + 1}
        if len(gradient):
            for name, other in (("end_to_end", end_to_end), ("delayed", delayed)):
                row[f"cosine_{name}"] = math.cos(angle(gradient, other))
                row[f"norm_ratio_{name}"] = float(gradient.norm() / other.norm())
            row["cosine_delayed_end_to_end"] = math.cos(angle(delayed, end_to_end))
            row["angle_stored"] = math.degrees(angle(gradient, case.stored.pop(j)))
        rebuilt, inputs = (without_side(x) if len(x) > 1 else x for x in (case.rebuilt.pop(j), case.inputs[j]))
        error = sum(float((a - b).double().square().sum()) for a, b in zip(rebuilt, inputs, strict=True))
        row["reconstruction_error"] = math.sqrt(error / sum(float(t.double().square().sum()) for t in inputs))
        return row

    def _stored(self, m: int, j: int, dy: Streams) -> Flat:
        case, stage = self._cases[m], self.pipeline.stages[j]
        stashed = self.pipeline.plan.method.weights is not Weights.CURRENT
        weights = case.weights[j] if stashed else [runner.versions.corrected for runner in stage.runners]
        y, leaves = _replayed(stage, m, case.inputs[j], weights), _leaves(stage, weights)
        connected = [(a, d) for a, d in zip(without_side(y), dy, strict=True) if a.requires_grad]
        if not connected or not leaves:
            return _joined(leaves, [None] * len(leaves))
        outputs, gradients = zip(*connected, strict=True)
        with _using(stage, weights):
            return _joined(leaves, torch.autograd.grad(outputs, leaves, gradients, allow_unused=True))

    def _backpropagated(self, m: int, weights: Mapping[int, Sequence[WeightVersion | None]]) -> dict[int, Flat]:
        stages = self.pipeline.stages
        x = self._cases[m].inputs[0]
        for j, stage in stages.items():
            x = _replayed(stage, m, x, weights[j])
        loss_port = self.pipeline.loss_port
        assert loss_port.data is not None
        with reading:
            targets = loss_port.data.targets(m)
        with torch.enable_grad():
            loss = loss_port.losses.training(*x, targets.to(loss_port.device))
        leaves = {j: _leaves(stage, weights[j]) for j, stage in stages.items()}
        every = [leaf for group in leaves.values() for leaf in group]
        with ExitStack() as stack:
            for j, stage in stages.items():
                stack.enter_context(_using(stage, weights[j]))
            found = iter(torch.autograd.grad(loss, every, allow_unused=True)) if every else iter(())
        return {j: _joined(group, [next(found) for _ in group]) for j, group in leaves.items()}


def angle(a: Tensor, b: Tensor) -> float:
    """Return the angle of two vectors (n,) in radians. Accurate for small ones, unlike the arc cosine (Kahan 2006, section 12)."""
    a, b = a / a.norm(), b / b.norm()
    return 2 * math.atan2(float((a - b).norm()), float((a + b).norm()))


def _replayed(stage: Stage, m: int, x: Streams, weights: Sequence[WeightVersion | None]) -> Streams:
    """Run a stage's forward pass again with a graph. Nothing is stored, and running statistics don't move."""
    with torch.enable_grad():
        for runner, version in zip(stage.runners, weights, strict=True):
            function = runner.function
            if isinstance(function, CheckedFunction):  # which waits for the backward pass, and this is another one
                function = function.function
            with function.keeping_statistics():
                x = stage.contiguous(function(m, x, version))
    return x


def _using(stage: Stage, weights: Sequence[WeightVersion | None]) -> ExitStack:
    """Give the stage's parameters the values of ``weights``, to differentiate what :func:`_replayed` returned."""
    stack = ExitStack()
    for runner, version in zip(stage.runners, weights, strict=True):
        stack.enter_context(runner.function.using(version))
    return stack


def _leaves(stage: Stage, weights: Sequence[WeightVersion | None]) -> list[Tensor]:
    """Return the tensors that take the place of the stage's parameters, in the order of the parameters."""
    pairs = zip(stage.runners, weights, strict=True)
    return [p if own is None else own[name] for runner, own in pairs for name, p in runner.parameters.items()]


def _joined(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Flat:
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, gradients, strict=True)]
    return torch.cat([part.detach().double().flatten() for part in parts]) if parts else torch.zeros(0, dtype=torch.float64)
