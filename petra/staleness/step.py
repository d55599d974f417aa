"""What remedies at the optimizer's steps share: a part of the update around each step, and checks of optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from petra.engine.update import Part, Tensors
from petra.errors import invalid
from petra.torch_private import foreach_sub


class AroundStep(Part):
    """Part of an update that acts directly before and after each step of the optimizer. A skipped step has no effect on it.

    Args:
        optimizer: The stage's optimizer.

    Attributes:
        parameters: The stage's trained parameters, in the optimizer's order.
        uses_change: Whether :meth:`after_step` needs the change of the parameters.
        kind: Name of ``kept`` in checkpoints; empty for a remedy without state.
        kept: State of the remedy: a tensor per parameter. Empty before the first update.
    """

    uses_change, kind = False, ""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self._before = optimizer, list[Tensor]()
        self.kept = list[Tensor]()
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def before_step(self) -> None:
        """Act before a step."""

    def after_step(self, change: list[Tensor]) -> None:
        """Act after a step, given the change of each parameter, or an empty list without ``uses_change``."""

    def set_weights(self) -> None:
        """Set the weights of passes until the next update, after the remedy's state or the weights have been replaced."""

    def tensors(self) -> dict[str, dict[Tensor, Tensor]]:
        return {f"method/{self.kind}": self.by_parameter(self.kept)}

    def load(self, numbers: Mapping[str, float], tensors: Tensors) -> None:
        """Restore the state. A parameter that comes from a stage without staleness, which had no state, gets zeros."""
        values = tensors.get(f"method/{self.kind}", {})
        self.kept = [values[p].to(p, copy=True) if p in values else torch.zeros_like(p) for p in self.parameters if values]
        self.set_weights()

    def restart(self) -> None:
        self.load({}, {})

    def by_parameter(self, values: list[Tensor]) -> dict[Tensor, Tensor]:
        """Return one tensor for each parameter by parameter; empty for an empty list."""
        return dict(zip(self.parameters, values, strict=True)) if values else {}

    @torch.no_grad()
    def _begin(self, *_: Any) -> None:
        self.before_step()
        if self.uses_change:
            self._before = [p.clone() for p in self.parameters]

    @torch.no_grad()
    def _end(self, *_: Any) -> None:
        before, self._before = self._before, []
        self.after_step(list(foreach_sub(self.parameters, before)) if before else [])


def require_momentum(remedy: str, optimizer: torch.optim.Optimizer, others: str = "") -> None:
    """Check that an optimizer is SGD with momentum.

    Args:
        remedy: Name of the remedy, for the message.
        optimizer: The optimizer of a stage.
        others: Other accepted optimizers, for the message.

    Raises:
        ConfigError: If it is another optimizer, or has a parameter group without momentum.
    """
    if not isinstance(optimizer, torch.optim.SGD) or not all(group["momentum"] > 0 for group in optimizer.param_groups):
        name = type(optimizer).__name__.lower() + (" without momentum" if isinstance(optimizer, torch.optim.SGD) else "")
        raise invalid("optim.name", f"{others}sgd with momentum > 0, which {remedy} requires", name)
