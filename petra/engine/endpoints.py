"""Ports at the two ends of a pipeline: the data before the first stage, and the loss after the last stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from petra.engine.metrics import Metric, count_targets, size_of
from petra.errors import ModelError, invalid, require
from petra.specs import Message, Streams, TensorSpec, detached, without_side
from petra.torch_private import leaves_of, storage_key, vector_jacobian_products, version_counter

Read = Callable[[int], Tensor]
"""Function of a microbatch that returns a tensor."""
Loss = Callable[..., Tensor]
"""Function of (output, targets) that returns the mean over the targets that are not ignored. Attributes that it may have:

* ``outputs``, a tuple of numbers: it is called with that many outputs of the last block, side tensors included, before
  the targets.
* ``outputs_with_rows``: how many of these, from the first, have rows; by default all. The others are weights, for example.
* ``mean_over_targets``: True if each target that is not -100 has the same weight. With replicas, another loss is computed for the
  targets of all replicas at each microbatch, to find the weight of a share; so is one without this attribute.
"""


@dataclass(frozen=True)
class Losses:
    """Different losses for training and evaluation, such as with and without label smoothing.

    Raises:
        ConfigError: If one is no function.
    """

    training: Loss
    evaluation: Loss

    def __post_init__(self) -> None:
        for loss in (self.training, self.evaluation):
            require(callable(loss), "loss", "a function of output and targets, or petra.Losses", repr(loss))


class DataSource(Protocol):
    """Microbatches by index, the same in every process. The first stage reads the inputs, the last stage reads the targets.

    On a GPU, another thread calls these methods in advance. With an attribute ``batch_size``, its number of rows, and a method
    ``real_rows(m)``, an evaluation leaves out the padding rows that follow the real ones.
    """

    def inputs(self, m: int) -> Tensor:
        """Return the inputs of microbatch ``m``."""

    def targets(self, m: int) -> Tensor:
        """Return the targets of microbatch ``m``."""


@runtime_checkable
class RefetchSource(DataSource, Protocol):
    """Data source whose inputs can be fetched twice: for the forward pass, and again for the backward pass of the first block."""

    def refetch(self, m: int) -> Tensor:
        """Return the inputs of microbatch ``m`` again, equal bit for bit.

        Called for the same microbatches in the same order as :meth:`inputs`, but later.
        """


def require_source(data: object, microbatches: int, *, refetches: bool) -> None:
    """Check the arguments of a run of a pipeline: a :class:`DataSource` and a number of microbatches.

    Args:
        refetches: Whether the source must be a :class:`RefetchSource`.

    Raises:
        ConfigError: If the source lacks a method, or the number is not an integer >= 0.
    """
    require(isinstance(microbatches, int) and microbatches >= 0, "microbatches", "an integer >= 0", microbatches)
    for name in ("inputs", "targets", "refetch") if refetches else ("inputs", "targets"):
        expected = f"a source with a method {name}(m), such as petra.data.TrainSource{' (or Runtime.refetch=False)' * refetches}"
        require(callable(getattr(data, name, None)), "data", expected, type(data).__name__)


def staged(read: Read, device: torch.device, microbatches: range) -> Read:
    """Return a function that reads consecutive microbatches and returns them on the device."""
    if device.type != "cuda":
        return read
    from petra.engine.options.staging import Staging

    return Staging(read, device, microbatches)


class DataPort:
    """Port before the first stage: delivers inputs, and adds up the reports that come back with the gradients.

    Args:
        inputs: Shape and type of a microbatch's inputs.
        device: Device of the first stage.
        channels_last: Whether 4-d inputs use the channels-last memory format.
        totals: Where to add up the reports of a training run (see :class:`LossPort`).
        dp: Number of replicas, each of which reports on its share of a microbatch.

    Attributes:
        on_microbatch: Called with the report of each microbatch; that of a share is multiplied by ``dp``. None by default.
    """

    _read: Callable[[int], Streams]
    _read_again: Callable[[int], Streams]

    def __init__(self, inputs: TensorSpec, device: torch.device, channels_last: bool, totals: Tensor, dp: int = 1) -> None:
        self.inputs, self.device, self.totals, self._dp = inputs, device, totals, dp
        self.on_microbatch: Callable[[Tensor], None] | None = None
        self.format = torch.channels_last if channels_last else torch.contiguous_format

    def start(self, data: DataSource, start: int, microbatches: int, *, training: bool = True) -> None:
        """Read the inputs of ``microbatches`` microbatches from number ``start`` on in the next run of the pipeline."""
        if training:
            self.totals.zero_()
        run = range(start, start + microbatches)
        self._read = self._streams(data.inputs, run)
        if isinstance(data, RefetchSource):
            self._read_again = self._streams(data.refetch, run)

    def send(self, m: int, message: Message) -> None:
        """Accept the backward message of microbatch ``m``. Only its report is used."""
        (report,) = message[-1]
        self.totals += report
        if self.on_microbatch is not None:
            self.on_microbatch(self._dp * report if self._dp > 1 else report)

    def receive(self, m: int) -> Message:
        """Return the inputs of microbatch ``m`` on the device.

        Raises:
            ModelError: If the inputs don't have the expected shape and type.
        """
        return (self._read(m),)

    def refetch(self, m: int) -> Streams:
        """Return the inputs of microbatch ``m`` once more, as :meth:`receive` did before."""
        return self._read_again(m)

    def _streams(self, read: Read, microbatches: range) -> Callable[[int], Streams]:
        """Return a function that reads inputs, and returns them on the device in their own memory: sources may reuse buffers."""

        def checked(m: int) -> Tensor:
            x = _tensor(read(m), f"the data of microbatch {m}")
            self.inputs.require(x, f"the data of microbatch {m}")
            return x

        on_device = staged(checked, self.device, microbatches)

        def streams(m: int) -> Streams:
            x = on_device(m)
            own = x.contiguous(memory_format=self.format) if x.dim() == 4 else x
            shared = self.device.type == "cpu" and storage_key(own) == storage_key(x)  # with the data source
            return (own.clone() if shared else own,)

        return streams


class LossPort:
    """Port after the last stage: turns an output into the backward message (output, gradient, report).

    A report is a float64 vector: number of targets that are not ignored, sum of their losses, sums of the metrics, which may be
    vectors. It travels with the backward messages to the first stage, so reporting the progress of training needs no collective.

    Args:
        device: Device of the last stage.
        losses: Losses for training and evaluation.
        metrics: Metrics by name.

    Attributes:
        data: Source of the targets.
        totals: Sum of the reports of an evaluation.
    """

    _read: Read

    def __init__(self, device: torch.device, losses: Losses, metrics: Mapping[str, Metric]) -> None:
        self.device, self.losses, self.metrics = device, losses, dict(metrics)
        self._scalars = [name for name, metric in metrics.items() if size_of(metric) == 1]  # slow to find out
        self.data: DataSource | None = None
        self._padded: Any = None
        self._pending: dict[int, Message] = {}
        self._training, self._start = True, 0
        self.totals = torch.zeros(2 + sum(map(size_of, metrics.values())), dtype=torch.float64, device=device)

    def start(self, data: DataSource, start: int, microbatches: int, *, training: bool = True) -> None:
        """Read the targets of ``microbatches`` microbatches from number ``start`` on in the next run of the pipeline."""
        self.totals.zero_()
        self.data, self._training, self._start, run = data, training, start, range(start, start + microbatches)
        read = staged(lambda m: _tensor(data.targets(m), f"the targets of microbatch {m}"), self.device, run)
        # A loss may change targets in place.
        self._read = (lambda m: read(m).clone()) if self.device.type == "cpu" else read
        self._padded = None if training or not hasattr(data, "real_rows") else data

    def send(self, m: int, message: Message) -> None:
        """Take the output of microbatch ``m``. Compute its loss and gradient, or in an evaluation, add its report to ``totals``."""
        (output,) = message
        targets, versions = self._read(m), [version_counter(t) for t in output]
        if self._padded is not None and (rows := self._padded.real_rows(m)) < self._padded.batch_size:
            from petra.engine.options.targets import without_padding

            with_rows = getattr(self.losses.evaluation, "outputs_with_rows", len(output))  # weights, for example, have none
            output, targets = without_padding(output, targets, rows, self._padded.batch_size, with_rows)
            if not rows:
                return
        count = count_targets(targets)
        if self._training:
            often = m % 16 == 0 or m < self._start + 16  # takes as long as a small loss
            loss, gradients = loss_and_gradients(self.losses.training, output, targets, count, check=often)
            gradients, report = self._of_share(m, output, gradients, self._report(output, targets, loss, count))
            self._pending[m] = (without_side(output), gradients, (report,))
        else:
            report = self._report(output, targets, _value(self.losses.evaluation, output, targets), count)
            self.totals += self._of_share(m, output, (), report)[1]
        unchanged = versions == [version_counter(t) for t in output]
        require(unchanged, "loss and metrics", "functions that leave the output as it is", "one that changes it", ModelError)

    def receive(self, m: int) -> Message:
        """Return the backward message of microbatch ``m``."""
        return self._pending.pop(m)

    def _of_share(self, m: int, output: Streams, gradients: Streams, report: Tensor) -> tuple[Streams, Tensor]:
        """Return gradients and report of a whole microbatch as they are. Those of a share are weighted."""
        return gradients, report

    def _report(self, output: Streams, targets: Tensor, loss: Tensor, count: Tensor) -> Tensor:
        metrics = {name: metric(*output, targets) for name, metric in self.metrics.items()}
        for name in self._scalars:
            _require_scalar(f"metric {name}", metrics[name])
        return _unless_empty(count, torch.cat([v.double().view(-1) for v in (count, loss * count, *metrics.values())]))


def _tensor(value: object, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise invalid(name, "a tensor", type(value).__name__, ModelError)
    return value


def _unless_empty(count: Tensor, values: Tensor) -> Tensor:
    """Return ``values``, or zeros if ``count`` is 0: the mean over no targets is NaN."""
    # Reading a value on the CPU needs no synchronization. A fake tensor, of a subclass, has no value.
    if type(count) is Tensor and count.is_cpu and count.item():
        return values
    return torch.where(count > 0, values, 0.0)


def _require_scalar(name: str, value: object) -> None:
    if not (isinstance(value, Tensor) and value.dim() == 0):
        got = str(TensorSpec(tuple(value.shape), value.dtype)) if isinstance(value, Tensor) else type(value).__name__
        raise invalid(name, "a tensor without dimensions", got, ModelError)


def _value(loss: Loss, output: Streams, targets: Tensor) -> Tensor:
    """Return a loss. If it raises an error, name the targets."""
    try:
        value = loss(*output, targets)
    except (IndexError, ValueError, RuntimeError) as error:
        from petra.engine.options.targets import misfit

        if (found := misfit(error, output[0], targets)) is None:
            raise  # no fault of the targets, but of the loss itself
        raise found from error
    _require_scalar("loss", value)
    return value


def loss_and_gradients(loss: Loss, output: Streams, targets: Tensor, count: Tensor, check: bool = True) -> tuple[Tensor, Streams]:
    """Return the loss of one microbatch and its gradients with respect to the output, all detached; 0 if no target counts."""
    output = tuple(t.requires_grad_(t.is_floating_point()) for t in detached(output))
    streams = without_side(output)
    with torch.enable_grad():
        value = _value(loss, output, targets)
    if check:
        for leaf in (leaf for leaf in leaves_of(value) if not any(leaf is t for t in output)):
            expected = "a function of outputs and targets (optim.weight_decay for a penalty on weights, a block for parameters)"
            got = f"one of another tensor {[*leaf.shape]}, whose gradient would be lost"
            raise invalid("loss", expected, got, ModelError)
    gradients = vector_jacobian_products([value], streams, [torch.ones_like(value)]) if value.requires_grad else (None,)
    found = tuple(_unless_empty(count, gradient) for gradient in gradients if gradient is not None)
    if len(found) < len(streams):
        raise invalid("loss", "a function of the output", "one that does not depend on it", ModelError)
    return value.detach(), found
