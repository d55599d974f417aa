"""The two ends of the pipeline, as ports: the data in front of the first stage, the loss behind the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from petra.specs import IGNORED, Message, TensorSpec

Loss = Callable[[Tensor, Tensor], Tensor]
"""(output, targets) → mean over the targets that count."""
Metric = Callable[[Tensor, Tensor], Tensor]
"""(output, targets) → sum over the targets that count, such as the number of correct answers."""


@dataclass(frozen=True)
class Losses:
    """Different losses for training and evaluation, such as with and without label smoothing."""

    training: Loss
    evaluation: Loss


class Stream(Protocol):
    """Microbatches by index, the same in every process: the first stage asks for inputs, the last for targets."""

    def inputs(self, m: int) -> Tensor: ...

    def targets(self, m: int) -> Tensor: ...


class Source:
    """Upstream of the first stage: hands out inputs, and takes in the reports that come back with the gradients."""

    def __init__(self, inputs: TensorSpec, device: torch.device, channels_last: bool, on_report: Callable[[Tensor], None]) -> None:
        self.inputs, self.device, self.on_report = inputs, device, on_report
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.stream: Stream | None = None

    def send(self, m: int, message: Message) -> None:
        (report,) = message[-1]
        self.on_report(report)

    def receive(self, m: int) -> Message:
        assert self.stream is not None
        x = self.stream.inputs(m)
        self.inputs.require(x, f"the data of microbatch {m}")
        x = _moved(x, self.device)
        return ((x.contiguous(memory_format=self.format) if x.dim() == 4 else x,),)


class Objective:
    """Downstream of the last stage: turns outputs into (output, δ, report), and counts in evaluation.

    A report is a float64 vector: targets that count, summed loss, summed metrics. It rides on the backward messages to the first
    stage, so that training needs no collective to tell how it goes.
    """

    def __init__(self, device: torch.device, losses: Losses, metrics: Mapping[str, Metric]) -> None:
        self.device, self.losses, self.metrics = device, losses, dict(metrics)
        self.stream: Stream | None = None
        self._pending: dict[int, Message] = {}
        self.totals = torch.zeros(2 + len(self.metrics), dtype=torch.float64, device=device)

    def send(self, m: int, message: Message) -> None:
        ((output,),) = message
        targets = self._targets(m)
        loss, gradient = _loss_and_gradient(self.losses.training, output, targets)
        self._pending[m] = ((output,), (gradient,), (self._report(output, targets, loss),))

    def receive(self, m: int) -> Message:
        return self._pending.pop(m)

    def loss_of(self, m: int, output: Tensor) -> Tensor:
        """The loss of microbatch m under plain autograd."""
        return self.losses.training(output, self._targets(m))

    def evaluate(self, m: int, message: Message) -> None:
        """Adds the microbatch's report to ``totals``."""
        ((output,),) = message
        targets = self._targets(m)
        self.totals += self._report(output, targets, self.losses.evaluation(output, targets))

    def _report(self, output: Tensor, targets: Tensor, loss: Tensor) -> Tensor:
        count = counted(targets)
        return torch.stack([v.double() for v in (count, loss * count, *(f(output, targets) for f in self.metrics.values()))])

    def _targets(self, m: int) -> Tensor:
        assert self.stream is not None
        return _moved(self.stream.targets(m), self.device)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; from pinned memory, so that the host does not wait for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def counted(targets: Tensor) -> Tensor:
    """How many targets count."""
    return (targets != IGNORED).sum() if targets.dtype == torch.int64 else torch.tensor(len(targets), device=targets.device)


def correct(output: Tensor, targets: Tensor) -> Tensor:
    """How many targets have the highest score; classes along dimension 1."""
    return (output.argmax(1) == targets).sum()


def among_five(output: Tensor, targets: Tensor) -> Tensor:
    """How many targets are among the five highest scores; more than five classes along dimension 1."""
    return (output.topk(5, 1).indices == targets.unsqueeze(1)).sum()


def _loss_and_gradient(loss: Loss, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of one microbatch and its gradient with respect to the last stage's output, both detached."""
    output = output.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(output, targets)
    (gradient,) = torch.autograd.grad(value, output)
    return value.detach(), gradient
