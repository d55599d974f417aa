"""Metrics: sums over the targets of a microbatch, such as the number of correct predictions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from petra.errors import ModelError, invalid
from petra.specs import IGNORED, TensorSpec

Metric = Callable[[Tensor, Tensor], Tensor]
"""Function of (output, targets) that returns a sum over the targets that are not ignored."""


def count_targets(targets: Tensor) -> Tensor:
    """Return the number of targets that are not ignored."""
    if targets.dtype == torch.int64:
        return (targets != IGNORED).sum()
    return torch.full((), len(targets), device=targets.device)  # torch.tensor would copy the number and wait for a GPU


def correct_predictions(output: Tensor, targets: Tensor) -> Tensor:
    """Return the number of targets that have the highest score. Classes are dimension 1 of the output.

    Raises:
        ModelError: If the targets are not integers.
    """
    _require_classes("accuracy", targets)
    return (output.argmax(1) == targets).sum()


def top5_correct(output: Tensor, targets: Tensor) -> Tensor:
    """Return the number of targets among the five highest scores. Classes are dimension 1 of the output, and more than five.

    Raises:
        ModelError: If the targets are not integers.
    """
    _require_classes("top5", targets)
    return (output.topk(5, 1).indices == targets.unsqueeze(1)).sum()


def _require_classes(name: str, targets: Tensor) -> None:
    if targets.is_floating_point():
        expected = "integer targets (for others, pass metrics= to Pipeline; metrics={} computes none)"
        raise invalid(f"metric {name}", expected, TensorSpec(tuple(targets.shape), targets.dtype), ModelError)
