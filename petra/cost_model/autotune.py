"""Chooses settings from the costs of blocks: the partition into stages, and what each block stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from petra.cost_model.costs import PARAMETER_COPIES, BlockCost, StageCost, pipeline_costs, stage_cost
from petra.cost_model.delays import choose_delays, largest_delay
from petra.cost_model.machines import INSTANT, Connection, Device, Link
from petra.cost_model.memory import PredictedMemory
from petra.errors import ConfigError, invalid
from petra.method import Keep, Method
from petra.plan.partition import Indices, RangeExtrema, Values, best_partition, partition_of, prefix_sums
from petra.plan.plan import keeps_of
from petra.plan.timetable import in_flight
from petra.settings import TransportName

Found = TypeVar("Found")
SEARCHES = 4
"""Searches for a partition that fits."""


@dataclass(frozen=True)
class _KeepOption:
    """One choice of what the first blocks of a stage store.

    Attributes:
        seconds: Time of forward and backward of these blocks.
        stored: Bytes between forward and backward, all microbatches in flight.
        temporary: Bytes of the largest graph that exists only during a backward.
        keeps: The choice.
    """

    seconds: float
    stored: int
    temporary: int
    keeps: tuple[Keep, ...]


def choose_keeps(
    blocks: Sequence[BlockCost],
    smallest_keeps: Sequence[Keep],
    microbatches: int,
    limit: float,
    *,
    parameter_copies: int = PARAMETER_COPIES,
) -> tuple[Keep, ...]:
    """Choose which blocks of one stage store their graph, so that the stage is as fast as its memory allows.

    This is a knapsack problem, solved exactly.

    Args:
        smallest_keeps: What each block stores if not its graph.
        microbatches: Microbatches in flight.
        limit: Bytes available. If the stage exceeds them even without graphs, ``smallest_keeps`` is returned.
        parameter_copies: As for :func:`petra.cost_model.costs.stage_cost`.
    """
    options = [_KeepOption(0.0, 0, 0, ())]
    for block, smallest in zip(blocks, smallest_keeps, strict=True):
        extended = []
        for option in options:
            for keep in dict.fromkeys((smallest, Keep.GRAPH)):
                seconds = option.seconds + sum(block.seconds(keep))
                stored = option.stored + microbatches * block.stored_bytes(keep)
                temporary = option.temporary if keep is Keep.GRAPH else max(option.temporary, block.graph_bytes)
                extended.append(_KeepOption(seconds, stored, temporary, (*option.keeps, keep)))
        options = _pareto_front(extended)
    fixed = parameter_copies * sum(block.parameter_bytes for block in blocks)
    return next((o.keeps for o in options if fixed + o.stored + o.temporary <= limit), tuple(smallest_keeps))


def _pareto_front(options: list[_KeepOption]) -> list[_KeepOption]:
    """Return the options that no other option beats in time, stored and temporary bytes at once, fastest first."""
    front: list[_KeepOption] = []
    for option in sorted(options, key=lambda o: (o.seconds, o.stored, o.temporary)):
        if not any(o.stored <= option.stored and o.temporary <= option.temporary for o in front):
            front.append(option)
    return front


@dataclass(frozen=True)
class Tuned:
    """Chosen settings, in the form that :class:`petra.Pipeline` takes, and the costs that they lead to.

    Attributes:
        stages: Number of blocks in each stage.
        delay: One boundary delay, or one for each boundary.
        keep: What blocks store: one value, or one for each block.
        costs: Cost of each stage.
        memory: Estimated bytes of each stage.
    """

    stages: tuple[int, ...]
    delay: int | tuple[int, ...]
    keep: Keep | tuple[Keep, ...]
    costs: tuple[StageCost, ...]
    memory: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Time of forward and backward of the slowest stage, divided by the mean of all stages."""
        times = [cost.forward + cost.backward for cost in self.costs]
        return max(times) * len(times) / sum(times)


@dataclass(frozen=True)
class _Stages:
    """Candidate stages of a model: what their blocks store, what they cost, and whether they fit into memory.

    Attributes:
        devices: Device of each stage.
        delays: Delay τ of each stage.
    """

    blocks: Sequence[BlockCost]
    method: Method
    k: int
    devices: Sequence[Device]
    delays: Sequence[int]
    tune_keep: bool
    parameter_copies: int

    def keeps(self, blocks: range, stage: int) -> tuple[Keep, ...]:
        """Return what each block of a stage stores, chosen by the method or by :func:`choose_keeps`."""
        costs = self.blocks[blocks.start : blocks.stop]
        keeps = self._method_keeps(blocks, stage)
        if self.tune_keep:
            limit = self.devices[stage].memory
            keeps = choose_keeps(costs, keeps, self._in_flight(stage), limit, parameter_copies=self.parameter_copies)
        return keeps

    def costs(self, partition: Sequence[range], keeps: Sequence[Sequence[Keep]]) -> list[StageCost]:
        """Return the cost of each stage on its device."""
        stages = [self.blocks[blocks.start : blocks.stop] for blocks in partition]
        costs = pipeline_costs(stages, keeps, parameter_copies=self.parameter_copies)
        return [cost.on(device.speed) for cost, device in zip(costs, self.devices, strict=True)]

    def memory(self, cost: StageCost, stage: int) -> int:
        """Return the bytes of a stage."""
        return cost.memory(self._in_flight(stage))

    def fastest_partition(self) -> list[range]:
        """Return the partition whose slowest stage is fastest."""
        try:
            return best_partition(len(self.blocks), len(self.devices), self._seconds)
        except ConfigError as error:
            raise ConfigError(f"trainer.stages: {error}") from error

    def _method_keeps(self, blocks: range, stage: int) -> tuple[Keep, ...]:
        reversible = [block.reversible for block in self.blocks[blocks.start : blocks.stop]]
        return keeps_of(self.method, reversible, last=self._is_last(stage), first_block=blocks.start)

    def _is_last(self, stage: int) -> bool:
        return stage == len(self.devices) - 1 and self.delays[stage] == 0

    def _in_flight(self, stage: int) -> int:
        return in_flight(self.delays[stage], self.k, self.method.flush)

    def _seconds(self, starts: Indices, ends: Indices, stage: int) -> Values:
        """Return the time per microbatch of each range of blocks as a stage; infinity if it doesn't fit into memory."""
        device = self.devices[stage]
        if self.tune_keep and device.memory < float("inf"):
            ranges = (range(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True))
            return np.array([self._seconds_of_range(blocks, stage) for blocks in ranges])
        # The blocks of the last stage store what they would store in a last stage of all blocks.
        sums = self._last_sums if self._is_last(stage) else self._sums
        seconds = (sums.seconds[ends] - sums.seconds[starts]) / device.speed
        memory = sums.fixed[ends] - sums.fixed[starts] + sums.temporary(starts, ends)
        memory += self._in_flight(stage) * (sums.stored[ends] - sums.stored[starts])
        return np.where(memory > device.memory, np.inf, seconds)

    def _seconds_of_range(self, blocks: range, stage: int) -> float:
        keeps = self.keeps(blocks, stage)
        costs = self.blocks[blocks.start : blocks.stop]
        cost = stage_cost(costs, keeps, parameter_copies=self.parameter_copies).on(self.devices[stage].speed)
        fits = self.memory(cost, stage) <= self.devices[stage].memory
        return cost.forward + cost.backward + cost.update / self.k if fits else float("inf")

    @cached_property
    def _sums(self) -> _Sums:
        return self._make_sums(last=False)

    @cached_property
    def _last_sums(self) -> _Sums:
        return self._make_sums(last=True)

    def _make_sums(self, *, last: bool) -> _Sums:
        """Return the sums of the blocks' costs. Without a memory limit, ``tune_keep`` chooses the faster of two choices."""
        keeps = keeps_of(self.method, [block.reversible for block in self.blocks], last=last)
        if self.tune_keep:
            keeps = tuple(choose_keeps([block], [keep], 0, float("inf"))[0] for block, keep in zip(self.blocks, keeps, strict=True))
        pairs = list(zip(self.blocks, keeps, strict=True))
        graphs = np.array([0.0 if keep is Keep.GRAPH else float(block.graph_bytes) for block, keep in pairs])
        return _Sums(
            seconds=prefix_sums([sum(block.seconds(keep)) + block.update / self.k for block, keep in pairs]),
            stored=prefix_sums([block.stored_bytes(keep) for block, keep in pairs]),
            fixed=prefix_sums([self.parameter_copies * block.parameter_bytes for block in self.blocks]),
            temporary=RangeExtrema(graphs, np.maximum),
        )


@dataclass(frozen=True)
class _Sums:
    """Sums over the first 0, 1, 2, … blocks, and the largest temporary graph of any range of blocks."""

    seconds: Values
    stored: Values
    fixed: Values
    temporary: RangeExtrema


def tune(
    blocks: Sequence[BlockCost],
    method: Method,
    k: int,
    stages: int | Sequence[int],
    *,
    tune_delay: bool = False,
    tune_keep: bool = False,
    limit: float = float("inf"),
    devices: Sequence[Device] | None = None,
    link: Link | Sequence[Connection] = INSTANT,
    processes: Sequence[range] | None = None,
    transport: TransportName = "auto",
    device_type: str = "cpu",
    parameter_copies: int = PARAMETER_COPIES,
) -> Tuned:
    """Choose the partition, then the delays for it, then again what blocks store, with the memory that smaller delays free.

    Args:
        stages: Number of stages, to be partitioned so that the slowest is as fast as possible; or the number of blocks in each.
        tune_delay: Choose the boundary delays and ignore ``method.delay``. The partition is chosen for d = 2, or less if the method
            allows no more. With one stage, there is no delay to choose.
        tune_keep: Store the graph of each block for which there is memory, and as little as possible of the others. Ignores
            ``method.keep``.
        limit: Bytes available to each stage.
        devices: Device of each stage, whose memory is another limit; None for equal devices.
        link, processes: As for :func:`petra.cost_model.simulator.predict`.
        transport, device_type: As for :func:`petra.cost_model.delays.choose_delays`.
        parameter_copies: As for :func:`petra.cost_model.costs.stage_cost`.

    Raises:
        ConfigError: If no partition keeps every stage within the limit.
    """
    count = stages if isinstance(stages, int) else len(stages)
    delay = largest_delay(method, k, count, 2) if tune_delay else method.delay
    method = replace(method, delay=delay, keep=Keep.NOTHING if tune_keep else method.keep)
    devices = [replace(device, memory=min(limit, device.memory)) for device in devices or (Device(),) * count]
    candidates = _Stages(tuple(blocks), method, k, devices, method.delays(count, k), tune_keep, parameter_copies)
    partition = candidates.fastest_partition() if isinstance(stages, int) else partition_of(stages)

    def choose() -> tuple[list[tuple[Keep, ...]], list[StageCost]]:
        keeps = [candidates.keeps(stage, j) for j, stage in enumerate(partition)]
        return keeps, candidates.costs(partition, keeps)

    keeps, costs = choose()
    if tune_delay and count > 1:
        delay = choose_delays(costs, method, k, link=link, processes=processes, transport=transport, device_type=device_type)
        candidates = replace(candidates, delays=replace(method, delay=delay).delays(count, k))
        keeps, costs = choose()
    memory = tuple(candidates.memory(cost, j) for j, cost in enumerate(costs))
    for j, (needed, device) in enumerate(zip(memory, devices, strict=True)):
        if needed > device.memory:
            expected = f"at least {needed / 1e9:.3g} GB for stage {j + 1} (or more stages)"
            raise invalid("trainer.memory_limit", expected, f"{device.memory / 1e9:g} GB")
    keep = tuple(keep for stage_keeps in keeps for keep in stage_keeps) if tune_keep else method.keep
    return Tuned(tuple(len(stage) for stage in partition), delay, keep, tuple(costs), memory)


def search_within(
    limits: Sequence[float],
    search: Callable[[Sequence[float]], Found],
    estimate: Callable[[Found], Sequence[float]],
    count: Callable[[Found], Sequence[PredictedMemory]],
    key: str,
    place: str,
) -> tuple[Found, list[PredictedMemory]]:
    """Search for a partition whose stages need at most ``limits`` bytes.

    A search compares many ranges of blocks by estimates of their memory. Then the memory of the partition found is counted. If a
    stage needs more than its limit, the next search must find an estimate for it that is smaller by the excess.

    Args:
        limits: Bytes available to each stage.
        search: Returns a partition that fits limits by estimates.
        estimate: Returns the estimated bytes of each stage of a partition.
        count: Returns the memory of each stage of a partition.
        key, place: What an error names: the setting, and what has the limits (``stage`` or ``device``).

    Returns:
        The partition and the memory of its stages.

    Raises:
        ConfigError: If none of a few partitions fits.
    """
    limited = list(limits)
    needs: list[float] = []
    for _ in range(SEARCHES):
        try:
            found = search(limited)
        except ConfigError:
            if not needs:
                raise
            break  # nothing fits the smaller limits by the estimates
        memory = list(count(found))
        needs = [counted.total for counted in memory]
        if all(need <= limit for need, limit in zip(needs, limits, strict=True)):
            return found, memory
        rows = zip(limited, estimate(found), needs, limits, strict=True)
        limited = [now if need <= limit else estimated - (need - limit) for now, estimated, need, limit in rows]
    worst = max(range(len(limits)), key=lambda j: needs[j] / limits[j])
    raise invalid(key, f"at least {needs[worst] / 1e9:.3g} GB for {place} {worst + 1}", f"{limits[worst] / 1e9:.3g} GB")
