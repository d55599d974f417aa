"""The switches that tell one training method from another (delay, keep, weights, flush), and the methods by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from petra.errors import ConfigError

LARGEST = 10_000
"""Of k and of a stage's delay, in microbatches."""


class Keep(StrEnum):
    """What a block holds of a microbatch between its forward and its backward."""

    GRAPH = "graph"
    """Its autograd graph: no second evaluation (3 units of compute)."""
    INPUT = "input"
    """Its input: evaluated again in the backward pass (4 units)."""
    NOTHING = "nothing"
    """Nothing: its input is reconstructed from its output (4 units); only reversible blocks can, others hold their input."""


class Weights(StrEnum):
    """Which weights the backward pass differentiates."""

    CURRENT = "current"
    """Those of the moment of the backward pass."""
    STASHED = "stashed"
    """Those that the forward pass of the same microbatch used: what was current then is copied at the next update."""
    DOUBLE = "double"
    """Of two versions, for forward and backward: those before the last update that all stages have done (PipeDream-2BW)."""


@dataclass(frozen=True)
class Method:
    """One point in the space of pipeline methods.

    Attributes:
        delay: boundary delay d: τ_j − τ_(j+1), one for all boundaries or a tuple with one for each.
        keep: what blocks hold between F and B, one for all or a tuple with one for each block of the model.
        fill: every stage forwards all k microbatches of an update before its first backward (GPipe); needs ``flush``.
        flush: the pipeline is drained before each update, so that gradients are exact.
    """

    name: str
    delay: int | tuple[int, ...]
    keep: Keep | tuple[Keep, ...]
    weights: Weights = Weights.CURRENT
    flush: bool = False
    fill: bool = False

    def __post_init__(self) -> None:
        if min(self.boundary_delays(0)) < 0:
            raise ConfigError(f"method.delay: found {self.delay}, accepted are integers >= 0, one or one per boundary")
        if self.fill and not self.flush:
            raise ConfigError("method.fill: found true with method.flush=false; forwarding all k microbatches first needs a flush")
        if self.flush and self.weights is Weights.DOUBLE:
            raise ConfigError("method.weights: found double with method.flush=true, accepted are current, stashed")

    def boundary_delays(self, boundaries: int) -> tuple[int, ...]:
        """d_j for each boundary (all that are given, for ``boundaries`` = 0)."""
        if isinstance(self.delay, int):
            return (self.delay,) * max(boundaries, 1)
        return self.delay or (0,)

    def delays(self, stages: int, k: int) -> tuple[int, ...]:
        """τ_j for each stage: the microbatches that it forwards between a microbatch's forward and its backward.

        PETRA: d = 2 at every boundary, so τ_j = 2(J − j) (PETRA, section 3.2).

        Raises:
            ConfigError: delays that don't fit the stages or k, or more microbatches than a schedule is checked for.
        """
        if k > LARGEST:
            raise ConfigError(f"k: found {k}, accepted are integers from 1 to {LARGEST}")
        if isinstance(self.delay, tuple) and len(self.delay) != stages - 1:
            raise ConfigError(
                f"method.delay: found {len(self.delay)} delays, accepted are one, or {stages - 1} for {stages} stages"
            )
        if self.fill:
            return (k - 1,) * stages
        between = self.boundary_delays(stages - 1)
        delays = tuple(sum(between[j : stages - 1]) for j in range(stages))
        if delays[0] > LARGEST:
            raise ConfigError(f"method.delay: found {delays[0]} in all, accepted are at most {LARGEST}")
        if self.weights is Weights.DOUBLE and delays[0] > k:
            raise ConfigError(
                f"k: found {k}, accepted are integers >= {delays[0]} (the delay of stage 1) with method.weights=double: "
                "two versions of the weights must do for all microbatches in flight"
            )
        return delays

    @property
    def writes_through_graphs(self) -> bool:
        """Whether graphs wait for B while updates change the weights that they refer to."""
        keeps = (self.keep,) if isinstance(self.keep, Keep) else self.keep
        return Keep.GRAPH in keeps and self.weights is Weights.CURRENT

    def check(self, delays: Sequence[int], k: int, *, casts: bool) -> None:
        """Refuses graphs that updates don't reach.

        Args:
            casts: evaluations work on casts of the weights (autocast).

        Raises:
            ConfigError: B would differentiate the casts that F made, not the current weights.
        """
        late = any(self.staleness(delay, k) for delay in delays)
        if late and casts and self.writes_through_graphs:
            raise ConfigError(
                "method.keep: found graph with method.weights=current under autocast, accepted are input, nothing, or "
                "method.weights=stashed: the graph holds casts of the weights, which updates don't reach"
            )

    def staleness(self, delay: int, k: int) -> float:
        """Updates of a stage with delay τ between a microbatch's forward and its backward, on average: τ / k, 0 if flushed.

        With double weights it is one at every stage: all microbatches of an update use the weights before the one before it.
        """
        if self.weights is Weights.DOUBLE:
            return 1.0
        return 0.0 if self.flush else delay / k

    def keep_of(self, reversible: Sequence[bool], *, last: bool, first_block: int = 0) -> tuple[Keep, ...]:
        """What each block of a stage keeps: a block that can't be inverted holds its input instead of nothing.

        Args:
            reversible: for each block of the stage, whether it can be inverted.
            first_block: index of the stage's first block in the model.
            last: the stage ends the pipeline and its backward follows its forward at once (τ = 0). The blocks behind its last
                reversible one then keep their graph: it lives no longer than the recomputation's would, and saves a forward.
        """
        asked = (self.keep,) * len(reversible) if isinstance(self.keep, Keep) else self.keep[first_block:][: len(reversible)]
        kept = [Keep.INPUT if keep is Keep.NOTHING and not r else keep for keep, r in zip(asked, reversible, strict=True)]
        if last:
            tail = max((i + 1 for i, r in enumerate(reversible) if r), default=0)
            kept[tail:] = [Keep.GRAPH] * (len(kept) - tail)
        return tuple(kept)


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
    )
}
"""By name, each with its source in docs/methods.md."""
