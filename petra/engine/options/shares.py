"""Loss of one replica's share of a microbatch, as its part of the loss of the whole microbatch.

A loss is a sum of functions of each target and its output, divided by a function of all targets: a mean, a mean with class weights
or with an ``ignore_index``, a plain sum. So the gradient with respect to the outputs of one share does not depend on the outputs of
the others. It is computed from the targets of all shares and any outputs for the others, :data:`FILL`. A mean over the targets that
are not -100 needs no such evaluation: its gradient is that of the share, times the fraction of the targets that are in the share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra.engine.endpoints import Loss, Losses, LossPort, loss_and_gradients
from petra.engine.metrics import Metric, count_targets
from petra.errors import ModelError, invalid, require
from petra.specs import IGNORED, Streams, is_side, without_side

FILL = 0.5
"""Output of shares of which this process knows only the targets. A loss of logits is defined for it, and one of probabilities."""


class Parts(NamedTuple):
    """Targets of the shares of a microbatch, without padding.

    Attributes:
        targets: Targets of each share.
        own: Index of this replica's share.
        counts: Number of targets of each share that are not ignored.
    """

    targets: Sequence[Tensor]
    own: int
    counts: Sequence[int]

    @property
    def fraction(self) -> float:
        """The fraction of the counted targets that are in this replica's share."""
        return self.counts[self.own] / max(sum(self.counts), 1)


class ShareSource(Protocol):
    """Part of a data source of shares."""

    def parts(self, m: int) -> Parts:
        """Return the targets of all shares of the microbatch to which share ``m`` of this replica belongs."""


def real_rows(source: object, m: int, dp: int, rows: int) -> list[int]:
    """Return the number of rows that are no padding in each of ``dp`` shares, of ``rows`` rows, of a microbatch."""
    real = source.real_rows(m) if hasattr(source, "real_rows") else dp * rows
    return [min(max(real - r * rows, 0), rows) for r in range(dp)]


def parts_of(source: object, m: int, chunks: Sequence[Tensor], rows: int, members: Sequence[int], own: int) -> Parts:
    """Return the shares of a microbatch, given the targets of each share with padding.

    Args:
        rows: Number of rows of a share.
        members: Replicas that take part.
        own: This replica.
    """
    real = real_rows(source, m, len(chunks), rows)
    found = [chunks[r][: len(chunks[r]) * real[r] // rows] for r in members]
    return Parts(found, members.index(own), [int(count_targets(t)) for t in found])


def is_mean(loss: Loss) -> bool:
    """Return whether a loss of torch or petra is the mean over the targets that are not -100."""
    if isinstance(loss, partial) and {*loss.keywords} <= {"label_smoothing", "fraction"}:
        loss = loss.func
    if type(loss) is nn.CrossEntropyLoss:
        return loss.weight is None and loss.ignore_index == IGNORED and loss.reduction == "mean"
    return loss is F.cross_entropy or (loss.__module__.startswith("petra.") and declares_mean(loss))


def declares_mean(loss: Loss) -> bool:
    """Return whether a loss declares that it is such a mean."""
    return bool(getattr(loss, "mean_over_targets", False))


class ShareLossPort(LossPort):
    """Port after the last stage of a replica. Gradients and losses are the share's part of those of the whole microbatch.

    Raises:
        ModelError: If the gradient of a share depends on outputs of others, or the loss is another one than it declares. The first
            microbatch whose shares have different targets shows it.
    """

    def __init__(self, device: torch.device, losses: Losses, metrics: Mapping[str, Metric]) -> None:
        super().__init__(device, losses, metrics)
        self._checked = set[bool]()  # for training, for evaluation

    def _of_share(self, m: int, output: Streams, gradients: Streams, report: Tensor) -> tuple[Streams, Tensor]:
        parts, loss = cast(ShareSource, self.data).parts(m), self.losses.training if self._training else self.losses.evaluation
        mean = tuple(parts.fraction * gradient for gradient in gradients)
        first = self._training not in self._checked and any(not torch.equal(t, parts.targets[0]) for t in parts.targets)
        if is_mean(loss) or not any(parts.counts) or (declares_mean(loss) and not first):
            return mean, report
        got, expected = "one that gets side tensors, of this share only", "one with mean_over_targets with replicas"
        require(len(without_side(output)) == len(output) or declares_mean(loss), "loss", expected, got, ModelError)
        whole = _Whole(loss, [t.to(self.device) for t in parts.targets], output, parts.own)
        value, found = whole.part(self._training)
        distances = [_distance(f, g) for f, g in zip(found, mean, strict=False)]  # an evaluation has no gradients
        if first:
            self._checked.add(self._training)
            whole.check()
            expected = "one without mean_over_targets, or the mean over the targets that are not -100"
            alike = not declares_mean(loss) or all(distance <= whole.tolerance for distance in distances)
            require(alike, "loss", expected, f"{whole.name}, in which targets have other weights", ModelError)
        report[1] = value * sum(parts.counts)
        rounding = min(64 * torch.finfo(output[0].dtype).eps, 4e-3)  # the bits of a mean over targets stay the same
        return tuple(torch.where(d <= rounding, g, f) for d, f, g in zip(distances, found, mean, strict=False)), report


class _Whole:
    """The loss of a whole microbatch, of which one share's output is known.

    Args:
        loss: The loss.
        targets: Targets of each share.
        output: Output of this replica's share.
        own: Its index.
    """

    def __init__(self, loss: Loss, targets: Sequence[Tensor], output: Streams, own: int) -> None:
        self._loss, self._targets, self._output, self._own = loss, targets, output, own
        self._with_rows = int(getattr(loss, "outputs_with_rows", len(output)))
        self.tolerance, self.name = torch.finfo(output[0].dtype).eps ** 0.6, getattr(loss, "__name__", type(loss).__name__)

    def part(self, training: bool) -> tuple[Tensor, Streams]:
        """Return this share's part of the loss and, in training, the gradients with respect to its output.

        The parts of all shares that have rows add up to the loss. Each is the change of the loss from :data:`FILL` to the output,
        and an equal part of the loss of :data:`FILL`.
        """
        base = self._value([self._filled(share) for share in range(len(self._targets))])
        given = self._own, self._output, self._filled
        value, gradients = self._gradients(*given) if training else (self._value(self._parts(*given)), ())
        return value - base + base / sum(len(t) > 0 for t in self._targets), gradients

    def check(self) -> None:
        """Check that the gradient of a share does not depend on the other outputs, and that the parts add up to the loss.

        Raises:
            ModelError: If not.
        """
        tolerance, shares = self.tolerance, range(len(self._targets))
        base, total = (self._value([fill(share) for share in shares]) for fill in (self._filled, self._resized))
        added = base
        for share in shares:
            own = self._resized(share)
            value, gradients = self._gradients(share, own, self._filled)
            added = added + value - base
            for others in (self._resized, self._mirrored):
                for g, h in zip(gradients, self._gradients(share, own, others)[1], strict=True):
                    self._require(_distance(g, h) <= tolerance)
        self._require((added - total).abs() <= tolerance * max(float(total.abs()), float(base.abs())))

    def _require(self, fits: Tensor) -> None:
        if not fits:
            expected = f"a mean or sum over targets, whose weights may depend on the targets, with dp={len(self._targets)}"
            got = f"{self.name}, whose gradient for one target depends on the outputs for others"
            raise invalid("loss", expected, got, ModelError)

    def _gradients(self, share: int, output: Streams, others: Callable[[int], Streams]) -> tuple[Tensor, Streams]:
        """Return the loss, and its gradients with respect to the output of one share, given those of others."""
        parts = self._parts(share, output, others)
        value, gradients = loss_and_gradients(self._loss, self._joint(parts), self._joint_targets(), torch.ones(()))
        count = min(self._with_rows, len(gradients))  # side tensors, which are last, have none
        rows = [torch.split(g, [len(part[i]) for part in parts])[share] for i, g in enumerate(gradients[:count])]
        return value, (*rows, *gradients[count:])

    def _parts(self, share: int, output: Streams, others: Callable[[int], Streams]) -> list[Streams]:
        return [output if each == share else others(each) for each in range(len(self._targets))]

    def _value(self, parts: Sequence[Streams]) -> Tensor:
        return self._loss(*self._joint(parts), self._joint_targets()).detach()

    def _joint(self, parts: Sequence[Streams]) -> Streams:
        with_rows = zip(*(part[: self._with_rows] for part in parts), strict=True)
        return (*(torch.cat(streams) for streams in with_rows), *self._output[self._with_rows :])

    def _joint_targets(self) -> Tensor:
        return torch.cat([*self._targets])

    def _filled(self, share: int) -> Streams:
        return tuple(t if is_side(t) else torch.full_like(t, FILL) for t in self._resized(share))

    def _mirrored(self, share: int) -> Streams:
        """Return values between those of the output and zero, where a loss of probabilities is defined."""
        return tuple(t if is_side(t) else t.flip(0) / 2 for t in self._resized(share))

    def _resized(self, share: int) -> Streams:
        """Return the output with as many rows as a share has without padding."""
        own, other = len(self._targets[self._own]), len(self._targets[share])
        streams = self._output[: self._with_rows]
        if own == other:
            return streams
        return tuple(t[torch.arange(len(t) * other // own, device=t.device) % len(t)] for t in streams)


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    """Return the norm of the difference, relative to that of ``expected``. 0 if both are zero."""
    difference, norm = (found.double() - expected.double()).norm(), expected.double().norm()
    return torch.where(difference > 0, difference / norm, difference)
