"""Chooses settings from the costs of blocks: the partition into stages, and the delays of their boundaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from petra.cost_model.costs import BlockCost, StageCost, pipeline_costs
from petra.cost_model.machines import INSTANT, Connection, Device, Link
from petra.cost_model.memory import PredictedMemory
from petra.cost_model.simulator import predict
from petra.errors import ConfigError, invalid
from petra.method import Keep, Method, Weights
from petra.plan.partition import Indices, Values, best_partition, partition_of, prefix_sums
from petra.plan.plan import keeps_of
from petra.plan.transport import simulated_transport
from petra.settings import TransportName

TOLERANCE = 0.01
"""Relative loss of throughput that a smaller delay may cost; less than the variation from run to run."""
LARGEST_DELAY = 4
"""Largest delay of a boundary that is tried."""
MOST_STAGES = 64
"""Stages above which all boundaries get the same delay: a search for each of them takes minutes."""
SEARCHES = 20
"""Searches for a partition that fits. Each one leaves at least one block less to the stages that need too much memory."""


@dataclass(frozen=True)
class Tuned:
    """Chosen settings, in the form that :class:`petra.Pipeline` takes, and the costs that they lead to.

    Attributes:
        stages: Number of blocks in each stage.
        delay: One boundary delay, or one for each boundary.
        costs: Cost of each stage.
        seconds: Time per microbatch of each stage: forward, backward, and its share of an update.
        keep: What each block stores, if that was chosen (:mod:`petra.cost_model.keeps`).
    """

    stages: tuple[int, ...]
    delay: int | tuple[int, ...]
    costs: tuple[StageCost, ...]
    seconds: tuple[float, ...]
    keep: tuple[Keep, ...] | None = None


def tune(
    blocks: Sequence[BlockCost],
    method: Method,
    k: int,
    stages: int | Sequence[int],
    *,
    tune_delay: bool = False,
    speeds: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
    link: Link | Sequence[Connection] = INSTANT,
    processes: Sequence[range] | None = None,
    transport: TransportName = "auto",
    device_type: str = "cpu",
) -> Tuned:
    """Choose the partition, then the delays for it.

    Args:
        stages: Number of stages, to be partitioned so that the slowest is as fast as possible; or the number of blocks in each.
        tune_delay: Choose the boundary delays and ignore ``method.delay``. The partition is chosen for d = 2, or less if the method
            allows no more. With one stage, there is no delay to choose.
        speeds: Speed of each stage's device relative to the one on which the blocks were measured; None for equal devices.
        limits: Largest time per microbatch of each stage.
        link, processes: As for :func:`petra.cost_model.simulator.predict`.
        transport, device_type: As for :func:`choose_delays`.

    Raises:
        ConfigError: If no partition keeps every stage within its limit.
    """
    count = stages if isinstance(stages, int) else len(stages)
    speeds, limits = speeds or [1.0] * count, limits or [float("inf")] * count
    tuned = replace(method, delay=largest_delay(method, k, count, 2)) if tune_delay else method
    ends_in_graph = tuned.delays(count, k)[-1] == 0
    last = [ends_in_graph and j == count - 1 for j in range(count)]
    sums = {}  # of the times of the first 0, 1, 2, … blocks; those of the last stage store what a last stage of all blocks would
    for ends in (False, True):
        kept = zip(blocks, keeps_of(method, [block.reversible for block in blocks], last=ends), strict=True)
        sums[ends] = prefix_sums([sum(block.seconds(keep)) + block.update / k for block, keep in kept])

    def seconds(starts: Indices, ends: Indices, j: int) -> Values:
        found: Values = (sums[last[j]][ends] - sums[last[j]][starts]) / speeds[j]
        return np.where(found > limits[j], np.inf, found)

    try:
        partition = best_partition(len(blocks), count, seconds) if isinstance(stages, int) else partition_of(stages)
    except ConfigError as error:
        raise ConfigError(f"trainer.stages: {error}") from error
    found = setting_of(blocks, partition, tuned, k, speeds)
    if tune_delay and count > 1:
        delay = choose_delays(found.costs, method, k, link=link, processes=processes, transport=transport, device_type=device_type)
        found = replace(found, delay=delay)
    return found


def setting_of(blocks: Sequence[BlockCost], partition: Sequence[range], method: Method, k: int, speeds: Sequence[float]) -> Tuned:
    """Return the setting of a partition, with the delays of the method and the costs of the stages on devices of some speeds."""
    ends_in_graph = method.delays(len(partition), k)[-1] == 0
    parts = [blocks[part.start : part.stop] for part in partition]
    keeps = [
        keeps_of(
            method,
            [block.reversible for block in part],
            last=ends_in_graph and j == len(parts) - 1,
            first_block=partition[j].start,
        )
        for j, part in enumerate(parts)
    ]
    costs = tuple(cost.on(speed) for cost, speed in zip(pipeline_costs(parts, keeps), speeds, strict=True))
    times = tuple(cost.forward + cost.backward + cost.update / k for cost in costs)
    return Tuned(tuple(map(len, partition)), method.delay, costs, times)


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
    """
    most, boundaries = largest_delay(method, k, len(costs), LARGEST_DELAY), len(costs) - 1
    period = partial(period_of, costs, method, k, link=link, processes=processes, transport=transport, device_type=device_type)
    if not boundaries:
        return ()
    longest_period = (1 + TOLERANCE) * period([most] * boundaries)
    uniform = next((d for d in range(most) if period([d] * boundaries) <= longest_period), most)
    delays = [uniform] * boundaries
    for boundary in reversed(range(boundaries)) if len(costs) <= MOST_STAGES else ():
        while delays[boundary]:
            lower = [*delays[:boundary], delays[boundary] - 1, *delays[boundary + 1 :]]
            if period(lower) > longest_period:
                break
            delays = lower
    return tuple(delays)


def period_of(
    costs: Sequence[StageCost],
    method: Method,
    k: int,
    delays: Sequence[int],
    *,
    link: Link | Sequence[Connection],
    processes: Sequence[range] | None,
    transport: TransportName,
    device_type: str,
) -> float:
    """Return the predicted seconds per microbatch with some boundary delays. The arguments are those of :func:`choose_delays`."""
    rules = simulated_transport(transport, delays, device_type, len(processes) if processes else None)
    return predict(costs, replace(method, delay=tuple(delays)), k, processes=processes, link=link, transport=rules).period


def search_within(
    devices: Sequence[Device],
    search: Callable[..., Tuned],
    predict: Callable[[Tuned], Sequence[PredictedMemory]] | None,
    key: str,
    place: str,
) -> tuple[Tuned, Sequence[PredictedMemory]]:
    """Search for the fastest partition whose stages need at most the memory of their devices.

    The fastest partition comes first. If a stage needs more than its memory, it gets fewer blocks in the next one: its time is
    limited to the part of its present time that its memory is of its needs.

    Args:
        devices: Device of each stage.
        search: :func:`tune` with all arguments but ``speeds`` and ``limits``.
        predict: Returns the memory of each stage of a partition; None if memory is no limit.
        key, place: What an error names: the setting, and what has the memory (``stage`` or ``device``).

    Returns:
        The partition and the memory of its stages, if it is predicted.

    Raises:
        ConfigError: If none of the partitions fits.
    """
    memory, speeds = [device.memory for device in devices], [device.speed for device in devices]
    limits, needs, tried = [float("inf")] * len(memory), [0.0] * len(memory), set[tuple[int, ...]]()
    while len(tried) < SEARCHES:
        try:
            found = search(speeds=speeds, limits=limits)
        except ConfigError:
            if not tried:
                raise
            break  # no partition has such short stages
        if found.stages in tried:
            break
        tried.add(found.stages)
        needed = () if predict is None else predict(found)
        needs = [part.total for part in needed]
        if predict is None or all(need <= available for need, available in zip(needs, memory, strict=True)):
            return found, needed
        rows = zip(limits, found.seconds, needs, memory, strict=True)
        limits = [limit if need <= given else min(limit, seconds * given / need) for limit, seconds, need, given in rows]
    worst = max(range(len(memory)), key=lambda j: needs[j] / memory[j])
    raise invalid(key, f"at least {needs[worst] / 1e9:.3g} GB for {place} {worst + 1}", f"{memory[worst] / 1e9:.3g} GB")
