"""Types and checks of learning rates and optimizers that several remedies share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from petra.errors import invalid

LearningRate = Callable[[int], float]
"""Maps the number of microbatches that a stage has processed to a learning rate."""


def require_momentum(key: str, optimizer: torch.optim.Optimizer, others: str = "") -> None:
    """Check that an optimizer is SGD with momentum.

    Args:
        key: Setting of the remedy, for the message.
        optimizer: The optimizer of a stage.
        others: Other accepted optimizers, for the message.

    Raises:
        ConfigError: If it is another optimizer, or has a parameter group without momentum.
    """
    if not isinstance(optimizer, torch.optim.SGD) or not all(group["momentum"] > 0 for group in optimizer.param_groups):
        name = type(optimizer).__name__.lower() + (" without momentum" if isinstance(optimizer, torch.optim.SGD) else "")
        raise invalid("optim.name", f"{others}sgd with momentum > 0, which remedy.{key} requires", name)


def momentum_of(state: Mapping[str, Any]) -> Tensor | None:
    """Return the momentum buffer in a parameter's optimizer state, of any optimizer of the project; None before the first step."""
    buffers = (state.get(key) for key in ("momentum_buffer", "velocity", "exp_avg"))
    return next((buffer for buffer in buffers if buffer is not None), None)
