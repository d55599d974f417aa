"""Pipeline methods: when stages run forward and backward, what they store in between, and which weights backward uses.

:class:`Method` describes a method by five switches. :data:`METHODS` contains the methods from the literature by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from petra.errors import check_types, invalid, require

MAX_MICROBATCHES_PER_UPDATE = 10_000
"""Largest accepted k."""
MAX_DELAY = 10_000
"""Largest accepted delay of a stage, in microbatches."""


class Keep(StrEnum):
    """What a block stores for a microbatch between its forward and its backward."""

    GRAPH = "graph"
    """Store the autograd graph. Backward needs no second forward: 3 units of compute per microbatch, where a forward is 1 unit."""
    INPUT = "input"
    """Store the input. Backward runs the forward again, as in activation checkpointing: 4 units of compute."""
    NOTHING = "nothing"
    """Store nothing. Backward reconstructs the input from the output: 4 units of compute.

    Blocks that aren't reversible store their input instead.
    """
    REFETCH = "refetch"
    """Store nothing. Backward fetches the input from the data source again, and runs the forward again: 4 units of compute.

    Only plans use it, for the first block instead of ``INPUT`` (:func:`petra.plan.make_plan`).
    """


class Weights(StrEnum):
    """Which version of the weights backward differentiates."""

    CURRENT = "current"
    """The weights at the time of the backward."""
    STASHED = "stashed"
    """The weights that the forward of the same microbatch used. They are copied before the next update overwrites them."""
    DOUBLE = "double"
    """Two versions. Both passes of a microbatch use the weights from before the previous update, at every stage (PipeDream-2BW)."""


@dataclass(frozen=True)
class Method:
    """A pipeline method.

    Stages are numbered j = 1 ... J. The delay τ_j of a stage is the number of microbatches that it forwards between the forward
    and the backward of one microbatch. τ_J is 0.

    Attributes:
        name: Name of the method in messages and records.
        delay: Boundary delay d_j = τ_j − τ_(j+1), either one integer for all boundaries or a tuple with one per boundary.
        keep: What blocks store between forward and backward, either one value for all blocks or a tuple with one per block.
        weights: Which weights backward differentiates.
        flush: Whether the pipeline is drained before each update, which makes gradients exact.
        fill: Whether each stage forwards all k microbatches of an update before its first backward, as in GPipe. Requires
            ``flush`` and makes ``delay`` irrelevant.
        max_updates: Largest number of updates of a stage between the forward and the backward of a microbatch, which k must be
            large enough for; None for no limit. With 1, accumulation alone bounds how far weights drift (PACI, Elam et al. 2026).

    Raises:
        ConfigError: If a value has another type, if a delay is negative, if ``keep`` is ``REFETCH``, if ``max_updates`` < 1, if
            ``fill`` is set without ``flush``, or if ``flush`` is combined with ``Weights.DOUBLE``.
    """

    name: str
    delay: Annotated[int | tuple[int, ...], ">= 0"]
    keep: Keep | tuple[Keep, ...]
    weights: Weights = Weights.CURRENT
    flush: bool = False
    fill: bool = False
    max_updates: Annotated[int | None, ">= 1"] = None

    def __post_init__(self) -> None:
        check_types(self, "method.")
        refetches = Keep.REFETCH in (self.keep if isinstance(self.keep, tuple) else (self.keep,))
        require(not refetches, "method.keep", "graph, input or nothing", "refetch")
        if self.fill and not self.flush:
            raise invalid("method.fill", "false with method.flush=false", "true")
        if self.flush and self.weights is Weights.DOUBLE:
            raise invalid("method.weights", "current or stashed with method.flush=true", "double")

    def boundary_delays(self, boundaries: int) -> tuple[int, ...]:
        """Return the delay d_j of each boundary. A delay given as a tuple is returned unchanged."""
        return (self.delay,) * boundaries if isinstance(self.delay, int) else self.delay

    def delays(self, stages: int, k: int) -> tuple[int, ...]:
        """Return the delay τ_j of each stage, in microbatches.

        PETRA has d = 2 at every boundary, so τ_j = 2(J − j) (Rivaud et al. 2024, appendix B).

        Args:
            stages: Number of stages J.
            k: Number of microbatches per update.

        Raises:
            ConfigError: If the number of delays doesn't match the stages, if k or a delay exceeds its limit, if
                ``Weights.DOUBLE`` is used with k < τ_1, or if ``max_updates`` · k < τ_1 without ``flush``.
        """
        require(k <= MAX_MICROBATCHES_PER_UPDATE, "k", f"an integer from 1 to {MAX_MICROBATCHES_PER_UPDATE}", k)
        if isinstance(self.delay, tuple) and len(self.delay) != stages - 1:
            raise invalid("method.delay", f"one delay, or {stages - 1} for {stages} stages", f"{len(self.delay)} delays")
        if self.fill:
            return (k - 1,) * stages
        between = self.boundary_delays(stages - 1)
        delays = tuple(sum(between[j:]) for j in range(stages))
        require(delays[0] <= MAX_DELAY, "method.delay", f"at most {MAX_DELAY} in total", delays[0])
        if self.weights is Weights.DOUBLE and delays[0] > k:
            expected = f"an integer >= {delays[0]} with method.weights=double (the delay of stage 1, so that two versions suffice)"
            raise invalid("k", expected, k)
        if self.max_updates is not None and not self.flush:
            least = -(-delays[0] // self.max_updates)
            require(k >= least, "k", f"an integer >= {least} with method.max_updates={self.max_updates}", k)
        return delays

    @property
    def writes_through_graphs(self) -> bool:
        """Whether updates write to weights that stored autograd graphs refer to."""
        return Keep.GRAPH in ((self.keep,) if isinstance(self.keep, Keep) else self.keep) and self.weights is Weights.CURRENT

    def staleness(self, delay: int, k: int) -> float:
        """Return the mean number of updates of a stage between the forward and the backward of a microbatch.

        This is τ / k, or 0 with ``flush``. With ``Weights.DOUBLE`` it is 1 at every stage: all microbatches of an update use the
        weights before the previous update.

        Args:
            delay: Delay τ of the stage, in microbatches.
            k: Number of microbatches per update.
        """
        if self.weights is Weights.DOUBLE:
            return 1.0
        return 0.0 if self.flush else delay / k


METHODS = {
    method.name: method
    for method in (
        Method("petra", delay=2, keep=Keep.NOTHING),
        Method("backprop", delay=0, keep=Keep.GRAPH),
        Method("reversible", delay=0, keep=Keep.NOTHING),
        Method("delayed", delay=2, keep=Keep.INPUT, weights=Weights.STASHED),
        Method("dsp", delay=2, keep=Keep.INPUT),
        Method("reconstruct_stashed", delay=2, keep=Keep.NOTHING, weights=Weights.STASHED),
        Method("pipedream", delay=1, keep=Keep.INPUT, weights=Weights.STASHED),
        Method("pipedream_2bw", delay=1, keep=Keep.INPUT, weights=Weights.DOUBLE),
        Method("1f1b", delay=1, keep=Keep.GRAPH, flush=True),
        Method("gpipe", delay=0, keep=Keep.GRAPH, flush=True, fill=True),
        Method("paci", delay=1, keep=Keep.GRAPH, max_updates=1),
    )
}
"""Methods by name. docs/methods.md lists their sources."""
