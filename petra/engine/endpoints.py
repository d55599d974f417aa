"""Ports at the two ends of a pipeline: the data before the first stage, and the loss after the last stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from petra.engine.metrics import Metric, count_targets
from petra.errors import ConfigError, ModelError, invalid, require
from petra.specs import Message, TensorSpec

Loss = Callable[[Tensor, Tensor], Tensor]
"""Function of (output, targets) that returns the mean over the targets that are not ignored."""


@dataclass(frozen=True)
class Losses:
    """Different losses for training and evaluation, such as with and without label smoothing."""

    training: Loss
    evaluation: Loss


class DataSource(Protocol):
    """Microbatches by index, the same in every process. The first stage reads the inputs, the last stage reads the targets."""

    def inputs(self, m: int) -> Tensor:
        """Return the inputs of microbatch ``m``."""
        ...

    def targets(self, m: int) -> Tensor:
        """Return the targets of microbatch ``m``."""
        ...


def require_source(data: object, microbatches: int) -> None:
    """Check the arguments of a run of a pipeline: a :class:`DataSource` and a number of microbatches.

    Raises:
        ConfigError: If the source lacks a method, or the number is not an integer >= 0.
    """
    require(isinstance(microbatches, int) and microbatches >= 0, "microbatches", "an integer >= 0", microbatches)
    if not all(callable(getattr(data, name, None)) for name in ("inputs", "targets")):
        expected = "a source with methods inputs(m) and targets(m), such as petra.data.TrainSource"
        raise invalid("data", expected, type(data).__name__, ConfigError)


class DataPort:
    """Port before the first stage: delivers inputs, and accepts the reports that come back with the gradients.

    Args:
        inputs: Shape and type of a microbatch's inputs.
        device: Device of the first stage.
        channels_last: Whether 4-d inputs use the channels-last memory format.
        on_report: Called with the report of each microbatch (see :class:`Objective`).

    Attributes:
        data: Source of the inputs. Set before each run of the pipeline.
    """

    def __init__(self, inputs: TensorSpec, device: torch.device, channels_last: bool, on_report: Callable[[Tensor], None]) -> None:
        self.inputs, self.device, self.on_report = inputs, device, on_report
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.data: DataSource | None = None

    def send(self, m: int, message: Message) -> None:
        """Accept the backward message of microbatch ``m``. Only its report is used."""
        (report,) = message[-1]
        self.on_report(report)

    def receive(self, m: int) -> Message:
        """Return the inputs of microbatch ``m`` on the device, in memory of their own: the source may reuse its buffer.

        Raises:
            ModelError: If the inputs don't have the expected shape and type.
        """
        assert self.data is not None
        x = self.data.inputs(m)
        self.inputs.require(x, f"the data of microbatch {m}")
        own = _moved(x, self.device)
        own = own.contiguous(memory_format=self.format) if own.dim() == 4 else own
        return ((own.clone() if own.data_ptr() == x.data_ptr() else own,),)


class Objective:
    """Port after the last stage: turns an output into the backward message (output, gradient, report).

    A report is a float64 vector: number of targets that are not ignored, sum of their losses, sums of the metrics. It travels with
    the backward messages to the first stage, so reporting the progress of training needs no collective.

    Args:
        device: Device of the last stage.
        losses: Losses for training and evaluation.
        metrics: Metrics by name.

    Attributes:
        data: Source of the targets. Set before each run of the pipeline.
        totals: Sum of the reports of an evaluation.
    """

    def __init__(self, device: torch.device, losses: Losses, metrics: Mapping[str, Metric]) -> None:
        self.device, self.losses, self.metrics = device, losses, dict(metrics)
        self.data: DataSource | None = None
        self._pending: dict[int, Message] = {}
        self.totals = torch.zeros(2 + len(self.metrics), dtype=torch.float64, device=device)

    def send(self, m: int, message: Message) -> None:
        """Take the output of microbatch ``m``, and compute its loss and gradient."""
        ((output,),) = message
        targets = self._targets(m)
        loss, gradient = _loss_and_gradient(self.losses.training, output, targets)
        # The mean over no targets is NaN.
        gradient = torch.where(count_targets(targets) > 0, gradient, 0.0)
        self._pending[m] = ((output,), (gradient,), (self._report(output, targets, loss),))

    def receive(self, m: int) -> Message:
        """Return the backward message of microbatch ``m``."""
        return self._pending.pop(m)

    def loss_of(self, m: int, output: Tensor) -> Tensor:
        """Return the training loss of microbatch ``m``, differentiable with respect to ``output``."""
        return self.losses.training(output, self._targets(m))

    def evaluate(self, m: int, message: Message) -> None:
        """Take the output of microbatch ``m`` in an evaluation, and add its report to ``totals``."""
        ((output,),) = message
        targets = self._targets(m)
        loss = self.losses.evaluation(output, targets)
        _require_scalar("loss", loss)
        self.totals += self._report(output, targets, loss)

    def _report(self, output: Tensor, targets: Tensor, loss: Tensor) -> Tensor:
        count, metrics = count_targets(targets), {name: metric(output, targets) for name, metric in self.metrics.items()}
        for name, value in metrics.items():
            _require_scalar(f"metric {name}", value)
        report = torch.stack([v.double() for v in (count, loss * count, *metrics.values())])
        return torch.where(count > 0, report, 0.0)

    def _targets(self, m: int) -> Tensor:
        assert self.data is not None
        return _moved(self.data.targets(m), self.device)


def _require_scalar(name: str, value: object) -> None:
    if not (isinstance(value, Tensor) and value.dim() == 0):
        got = str(TensorSpec(tuple(value.shape), value.dtype)) if isinstance(value, Tensor) else type(value).__name__
        raise invalid(name, "a tensor without dimensions", got, ModelError)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device. Copies to a GPU are made from pinned memory, so that the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _loss_and_gradient(loss: Loss, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of one microbatch and its gradient with respect to the output, both detached."""
    output = output.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(output, targets)
    _require_scalar("loss", value)
    (gradient,) = torch.autograd.grad(value, output)
    return value.detach(), gradient
