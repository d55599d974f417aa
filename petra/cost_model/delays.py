"""Chooses the boundary delays: the smallest ones that keep the throughput of the largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from petra.cost_model.costs import StageCost
from petra.cost_model.machines import INSTANT, Connection, Link, connections
from petra.cost_model.simulator import predict
from petra.method import Method, Weights
from petra.plan.transport import simulated_transport
from petra.settings import TransportName

TOLERANCE = 0.01
"""Relative loss of throughput that a smaller delay may cost; less than the variation from run to run."""
FIRST_REACH = 4
"""Stages on each side of a boundary that are looked at first."""


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

    The search starts from the smallest delay that suffices at all boundaries. It then lowers the delay of one boundary at a time,
    starting at the last, whose delay adds to the staleness of all stages before it. No delay of the result can be lowered alone.
    Which delays are too small is found in a few stages around a boundary, and in more of them until the whole pipeline agrees.

    Args:
        costs: Cost of each stage.
        k: Microbatches per update.
        link, processes: As for :func:`petra.cost_model.simulator.predict`.
        transport: Transport that the run requests.
        device_type: ``cpu`` or ``cuda``, by which ``auto`` selects a transport.
        max_delay: Largest delay of a boundary.
    """
    max_delay = largest_delay(method, k, len(costs), max_delay)
    boundaries = len(costs) - 1
    if not boundaries:
        return ()
    stages = tuple(processes) if processes else tuple(range(j, j + 1) for j in range(len(costs)))
    pipeline = _Pipeline(tuple(costs), method, k, connections(link, len(stages)), stages, transport, device_type)
    longest_period = (1 + TOLERANCE) * pipeline.period([max_delay] * boundaries)
    uniform = next((d for d in range(max_delay) if pipeline.period([d] * boundaries) <= longest_period), max_delay)
    reach = FIRST_REACH if pipeline.divisible else boundaries
    while True:
        delays = pipeline.lowered(uniform, longest_period, reach)
        if reach >= boundaries or pipeline.period(delays) <= longest_period:
            return tuple(delays)
        reach *= 2


@dataclass(frozen=True)
class _Pipeline:
    """A pipeline whose delays are to be chosen."""

    costs: tuple[StageCost, ...]
    method: Method
    k: int
    connections: tuple[Connection, ...]
    processes: tuple[range, ...]
    transport: TransportName
    device_type: str

    @property
    def divisible(self) -> bool:
        """Whether the period of a part is a lower bound of the whole pipeline's: each stage has a process and never drains."""
        return len(self.processes) == len(self.costs) and not self.method.flush

    def period(self, delays: Sequence[int]) -> float:
        """Return the period with these boundary delays."""
        return _period(self, tuple(delays))

    def lowered(self, delay: int, limit: float, reach: int) -> list[int]:
        """Lower each delay as far as the stages around its boundary don't prove that the period is above ``limit``.

        A smaller delay never makes the period shorter. If the result is possible, so are the delays on the way to it.
        """
        delays = [delay] * (len(self.costs) - 1)
        for boundary in reversed(range(len(delays))):
            while delays[boundary]:
                delays[boundary] -= 1
                if self.must_exceed(limit, delays, boundary, reach):
                    delays[boundary] += 1
                    break
        return delays

    def must_exceed(self, limit: float, delays: Sequence[int], boundary: int, reach: int) -> bool:
        """Return whether the stages around ``boundary`` alone prove that the period is above ``limit``."""
        if reach >= len(delays):
            return self.period(delays) > limit
        if delays[boundary] == 0:
            pair = self.costs[boundary : boundary + 2]
            if sum(cost.forward + cost.backward for cost in pair) > limit:  # the two stages take turns
                return True
        if simulated_transport(self.transport, delays, self.device_type) == "lockstep" and min(delays) == 0:
            return False  # the rounds of the whole pipeline differ from those of a part
        start, stop = max(0, boundary - reach), min(len(self.costs), boundary + 2 + reach)
        part = replace(
            self,
            costs=self.costs[start:stop],
            connections=self.connections[start : stop - 1],
            processes=tuple(range(j, j + 1) for j in range(stop - start)),
            transport=simulated_transport(self.transport, delays, self.device_type),
        )
        return part.period(delays[start : stop - 1]) > limit


@lru_cache(maxsize=1024)  # many parts of a pipeline are equal
def _period(pipeline: _Pipeline, delays: tuple[int, ...]) -> float:
    transport = simulated_transport(pipeline.transport, delays, pipeline.device_type)
    method = replace(pipeline.method, delay=delays)
    found = predict(
        pipeline.costs, method, pipeline.k, link=pipeline.connections, processes=pipeline.processes, transport=transport
    )
    return found.period
