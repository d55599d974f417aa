"""What remedies share: a part of the update around each step of the optimizer, and checks of settings and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.engine.options.extension import Extension
from petra.engine.update import Part
from petra.errors import check_types, invalid
from petra.torch_private import foreach_sub


@dataclass(frozen=True)
class Checked(Extension):
    """Remedy that checks the types of its settings."""

    def __post_init__(self) -> None:
        check_types(self, "remedy.")


class AroundStep(Part):
    """Part of an update that acts directly before and after each step of the optimizer. A skipped step has no effect on it.

    Args:
        optimizer: The stage's optimizer.

    Attributes:
        parameters: The stage's trained parameters, in the optimizer's order.
        values: A tensor per parameter that checkpoints contain; empty before the first update, and without ``kind``.
        kind: Name of ``values`` in checkpoints.
        missing: What ``values`` contain of a parameter before its first update.
        skipped: Not zero if the device skips this step; None if the optimizer can't skip steps there.
        uses_change: Whether :meth:`after_step` needs the change of the parameters.
    """

    kind, missing = "", 0.0
    uses_change = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self._before, self.values = optimizer, list[Tensor](), list[Tensor]()
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def before_step(self) -> None:
        """Act before a step."""

    def after_step(self, change: list[Tensor]) -> None:
        """Act after a step, given the change of each parameter, or an empty list without ``uses_change``."""

    def refresh(self) -> None:
        """Compute what follows from weights, optimizer and ``values``, which have been loaded or have changed."""

    def tensors(self) -> dict[str, dict[Tensor, Tensor]]:
        return {f"method/{self.kind}": self.by_parameter(self.values)} if self.kind else {}

    def resume(self, tensors: Mapping[str, Mapping[Tensor, Tensor]]) -> None:
        # After a change of partition, a parameter may come from a stage without staleness, which had no state.
        saved, new = tensors.get(f"method/{self.kind}", {}), self.missing
        self.values = [saved[p].to(p, copy=True) if p in saved else torch.full_like(p, new) for p in self.parameters if saved]
        self.refresh()

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
        skipped = self.skipped = getattr(self.optimizer, "found_inf", None)
        old = [] if skipped is None else [value.clone() for value in self.values]
        self.after_step(list(foreach_sub(self.parameters, before)) if before else [])
        if skipped is not None and self.values:
            old = old or [torch.full_like(p, self.missing) for p in self.parameters]
            self.values = [torch.where(skipped > 0, *pair) for pair in zip(old, self.values, strict=True)]
            self.refresh()


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
        raise invalid("optim", f"{others}sgd with momentum > 0, which {remedy} requires", name)
