"""Error feedback: an update is extrapolated by the staleness, from the last two updates.

    w ← w − u_t − c·s·(u_t − u_(t−1))

where u_t is what the optimizer subtracts, with its learning rate and weight decay, u_(t−1) the same of the update before (not the
corrected one), s the staleness in updates, and c the setting. The first update is not corrected.

Source: arXiv 2606.30634, for a delay of one update (s = 1, as in PipeDream-2BW) and c = 1; compared with the code of
lodestone-rock/RamTorch. The factor s for other delays is our extension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petra.torch_private import foreach_sub


class ErrorFeedback:
    """Corrects each update of a stage.

    Args:
        parameters: The stage's trained parameters, in the optimizer's order.
        strength: c·s.

    Attributes:
        previous: −u_(t−1) of each parameter; empty before the first update, NaN while the device has skipped all updates.
    """

    def __init__(self, parameters: list[Tensor], strength: float) -> None:
        self._parameters, self._strength = parameters, strength
        self.previous: list[Tensor] = []

    def after_step(self, change: Sequence[Tensor], skipped: Tensor | None) -> None:
        """Correct an update, and store it for the next one.

        Args:
            change: −u_t of each parameter. A parameter without a gradient is not corrected.
            skipped: Not zero if the optimizer skipped the update on the device; nothing is corrected or stored then.
        """
        if self.previous:
            difference = foreach_sub(list(change), self.previous)
            for p, correction, previous in zip(self._parameters, difference, self.previous, strict=True):
                if p.grad is None:
                    continue
                unknown = previous.isnan() if skipped is None else previous.isnan() | (skipped > 0)
                p.add_(torch.where(unknown, 0.0, correction), alpha=self._strength)
        if skipped is None:
            self.previous = list(change)
        else:
            before = self.previous or [torch.full_like(new, torch.nan) for new in change]
            self.previous = [torch.where(skipped > 0, old, new) for old, new in zip(before, change, strict=True)]
