"""Chooses the boundary delays: the smallest ones that keep the throughput of the largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petra.cost_model.costs import StageCost
from petra.cost_model.machines import INSTANT, Connection, Link
from petra.cost_model.simulator import predict
from petra.method import Method, Weights
from petra.plan.transport import simulated_transport
from petra.settings import TransportName

TOLERANCE = 0.01
"""Relative loss of throughput that a smaller delay may cost; less than the variation from run to run."""
MOST_STAGES = 64
"""Stages above which all boundaries get the same delay: a search for each of them takes minutes."""


def largest_delay(method: Method, k: int, stages: int, most: int) -> int:
    """Return the largest delay that all boundaries may have under a method, up to ``most``."""
    updates = 1 if method.weights is Weights.DOUBLE else None if method.flush else method.max_updates
    return most if updates is None else min(most, updates * k // max(stages - 1, 1))


def choose_delays(
    costs: Sequence[StageCost],
    method: Method,
    k: int,
    *,
    link: Link | Sequence[Connection] = INSTANT,
    processes: Sequence[range] | None = None,
    transport: TransportName = "auto",
    device_type: str = "cpu",
    max_delay: int = 4,
) -> tuple[int, ...]:
    """Choose the smallest boundary delays that keep the throughput of the largest ones, up to :data:`TOLERANCE`.

    The search starts from the smallest delay that suffices at all boundaries. With at most :data:`MOST_STAGES` stages, it then
    lowers the delay of one boundary at a time, starting at the last, whose delay adds to the staleness of all stages before it. No
    delay of the result can be lowered alone.

    Args:
        costs: Cost of each stage.
        k: Microbatches per update.
        link, processes: As for :func:`petra.cost_model.simulator.predict`.
        transport: Transport that the run requests.
        device_type: ``cpu`` or ``cuda``, by which ``auto`` selects a transport.
        max_delay: Largest delay of a boundary.
    """
    max_delay, boundaries = largest_delay(method, k, len(costs), max_delay), len(costs) - 1

    def period(delays: Sequence[int]) -> float:
        rules = simulated_transport(transport, delays, device_type)
        return predict(costs, replace(method, delay=tuple(delays)), k, processes=processes, link=link, transport=rules).period

    if not boundaries:
        return ()
    longest_period = (1 + TOLERANCE) * period([max_delay] * boundaries)
    uniform = next((d for d in range(max_delay) if period([d] * boundaries) <= longest_period), max_delay)
    delays = [uniform] * boundaries
    for boundary in reversed(range(boundaries)) if len(costs) <= MOST_STAGES else ():
        while delays[boundary]:
            lower = [*delays[:boundary], delays[boundary] - 1, *delays[boundary + 1 :]]
            if period(lower) > longest_period:
                break
            delays = lower
    return tuple(delays)
