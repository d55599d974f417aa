"""Settings of a stage's updates: clipping, moving average, loss scale, and the reaction to non-finite gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from petra.errors import check_types, require


@dataclass(frozen=True)
class UpdateRules:
    """Settings of a stage's updates besides the optimizer.

    Attributes:
        clip: Largest 2-norm of the gradient of one update, or None to leave gradients as they are.
        clip_globally: Clip by the norm of the whole network's gradient instead of the stage's. All stages must update at the same
            time.
        average: Decay of a moving average of the weights, which evaluation uses, or None for no average.
        loss_scale: Factor of the gradients inside a stage, for fp16, or None. Gradients are divided by it before they are used.
            ``dynamic`` halves the factor after an overflow and doubles it after
            :data:`petra.engine.options.loss_scale.GROWTH_INTERVAL` updates without one. Gradients travel between stages unscaled in
            float32, so each stage has a scale of its own.
        nonfinite: Reaction to a non-finite gradient: ``stop`` the run, or ``skip`` the update of the stage. With a dynamic scale
            above 1, the update is skipped in either case.

    Raises:
        ConfigError: If a value is out of range or of another type, or ``clip_globally`` is set without ``clip``.
    """

    clip: float | None = None
    clip_globally: bool = False
    average: float | None = None
    loss_scale: float | Literal["dynamic"] | None = None
    nonfinite: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        scale = self.loss_scale
        number = isinstance(scale, int | float) and 0 < scale < math.inf
        require(number or scale in (None, "dynamic"), "trainer.loss_scale", "null, dynamic or a number > 0", scale)
        require(self.nonfinite in ("stop", "skip"), "trainer.nonfinite", "stop or skip", self.nonfinite)
        check_types(self)
        require(self.clip is None or self.clip > 0, "optim.clip", "null or a number > 0", self.clip)
        require(self.clip is not None or not self.clip_globally, "optim.clip_scope", "stage with optim.clip=null", "global")
        decay_fits = self.average is None or 0 < self.average < 1
        require(decay_fits, "optim.ema", "null or a number between 0 and 1", self.average)

    @property
    def may_skip(self) -> bool:
        """Whether a non-finite gradient may skip an update instead of stopping the run."""
        return self.nonfinite == "skip" or self.loss_scale is not None
