"""Settings of a stage's updates: clipping, moving average, loss scale, and the reaction to non-finite gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp
from typing import Annotated, Literal

from petra.errors import check_types, require


@dataclass(frozen=True)
class UpdateRules:
    """Settings of a stage's updates besides the optimizer.

    Attributes:
        clip: Largest 2-norm of the gradient of one update, or None to leave gradients as they are.
        clip_globally: Clip by the norm of the whole network's gradient instead of the stage's. All stages must update at the same
            time.
        average: Decay of a moving average of the weights, which evaluation uses, such as 0.999, or None for no average.
        loss_scale: Factor of the gradients inside a stage, a power of two, or None: on the command line ``dynamic`` for fp16.
            Gradients are divided by it before use, and travel between stages unscaled in float32. ``dynamic`` halves the factor
            after an overflow and doubles it after :data:`petra.engine.options.loss_scale.GROWTH_INTERVAL` updates without one.
        shard: Divide the optimizer's state over replicas (docs/data_parallel.md). Results are equal bit for bit.
        weights: Type of parameters with two or more dimensions; ``bf16`` with trainer.precision=bf16 (docs/performance.md).
        nonfinite: Reaction to a non-finite gradient: ``stop`` the run, or ``skip`` the update of the stage. With a dynamic scale
            above 1, the update is skipped in either case.

    Raises:
        ConfigError: If a value is out of range or of another type, or ``clip_globally`` is set without ``clip``.
    """

    clip: Annotated[float | None, "> 0"] = None
    clip_globally: bool = False
    average: Annotated[float | None, "> 0 and < 1"] = None
    loss_scale: Annotated[float | Literal["dynamic"] | None, "> 0"] = None
    shard: Annotated[bool, "same results"] = False
    weights: Literal["float32", "bf16"] = "float32"
    nonfinite: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        check_types(self, "optim.")
        exact = self.loss_scale in (None, "dynamic") or frexp(float(self.loss_scale))[0] == 0.5
        require(exact, "optim.loss_scale", "null, dynamic or a power of two, which rounds nothing", self.loss_scale)
        only = self.clip is not None or not self.clip_globally
        require(only, "optim.clip_globally", "false with optim.clip=null", self.clip_globally)

    @property
    def may_skip(self) -> bool:
        """Whether a non-finite gradient may skip an update instead of stopping the run."""
        return self.nonfinite == "skip" or self.loss_scale is not None
