"""Chooses what each block stores, so that the slowest stage is as fast as possible within the memory of the devices.

A graph saves the second evaluation of its block, and needs more bytes for each microbatch in flight. For one stage this is a
knapsack problem, and with the partition it stays one of dynamic programming: over the bytes of a stage, and over its ends. Both are
exact for bytes that add up. What does not, such as messages and the temporary memory of a pass, is taken from
:func:`petra.cost_model.memory.predict_memory` for the setting that was found, and the search is repeated with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from petra.cost_model.autotune import TOLERANCE, Tuned, choose_delays, largest_delay, period_of, setting_of
from petra.cost_model.costs import BlockCost
from petra.cost_model.machines import INSTANT, Connection, Device, Link
from petra.cost_model.memory import PredictedMemory
from petra.cost_model.stage_memory import Known, count_stage
from petra.engine.recipe import Recipe
from petra.errors import ConfigError, invalid
from petra.method import Keep, Method, Weights
from petra.plan import Plan, make_plan
from petra.plan.partition import Indices, Values, best_partition, partition_of
from petra.plan.timetable import in_flight
from petra.settings import TransportName
from petra.specs import TensorSpec

STEPS = 1000
"""Steps into which the memory of a stage is divided. The bytes of each block are rounded up to a step, of at least one byte."""
SEARCHES = 8
"""Searches with the memory that was predicted for the result of the one before."""
DELAYS = 3
"""Searches for different delays."""
NEARLY = 1e-6
"""Stages whose times differ by less, relative to the slowest, are equally slow."""

Predict = Callable[[Tuned], Sequence[PredictedMemory]]
"""Predicts the memory of each stage of a setting."""
Found = tuple[Tuned, Sequence[PredictedMemory]]
"""A setting, and the memory of its stages."""


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one block.

    Attributes:
        fixed: Weights, gradients and states of the optimizer.
        stored: What each microbatch in flight stores, by what the block may store.
    """

    fixed: int
    stored: Mapping[Keep, int]


def count_memory(plan: Plan, recipe: Recipe, targets: TensorSpec, known: Known, *, graphs: bool = True) -> list[BlockMemory]:
    """Count the bytes of each block of a plan's model, for all that it may store. Nothing is allocated.

    A reversible block may store its graph or nothing, any other its graph or its input. A stored input takes a reversible block as
    much time as a reconstruction, and memory.

    Args:
        known: As for :func:`petra.cost_model.stage_memory.count_stage`.
        graphs: Whether blocks may store their graph.

    Raises:
        PetraError: As :func:`petra.cost_model.stage_memory.count_stage`.
    """
    model, numerics, stored, fixed = plan.model, plan.numerics, list[dict[Keep, int]](), list[int]()
    for keep in (Keep.NOTHING, Keep.GRAPH):
        method = Method("blocks", 2, keep, plan.method.weights if plan.method.weights is not Weights.DOUBLE else Weights.STASHED)
        # A plan in which no block stores its input refuses stored_format. Blocks are counted with it below.
        single = make_plan(model, plan.layout.inputs, method=method, k=plan.k, numerics=replace(numerics, stored_format=None))
        for b, stage in enumerate(single.stages):
            last = targets if b == len(single.stages) - 1 else None
            found = count_stage(model, stage, numerics, recipe=recipe, run=single, targets=last, known=known)
            if keep is Keep.NOTHING:
                stored.append({})
                fixed.append(found.weights + found.gradients + found.optimizer)
            if graphs:
                stored[b][stage.keeps[0]] = found.stored
            elif keep is Keep.NOTHING:  # the plan lets the last block store its graph
                stored[b][keep if stage.profiles[0].reversible else Keep.INPUT] = found.stored
    return [BlockMemory(size, own) for size, own in zip(fixed, stored, strict=True)]


@dataclass(frozen=True)
class Choices:
    """What the blocks of a model may store.

    Attributes:
        seconds: Time of each block per microbatch, by what it stores.
        memory: Bytes of each block, with the same keys.
    """

    seconds: Sequence[Mapping[Keep, float]]
    memory: Sequence[BlockMemory]

    def fastest(self, start: int, end: int, in_flight: int, limit: int) -> tuple[Keep, ...] | None:
        """Return what the blocks ``start`` … ``end`` − 1 store as one stage in the least time; None if the stage does not fit.

        Of equally fast choices, it is one with the fewest bytes. Of those, one with graphs at the end of the stage: a backward
        begins there, so these graphs are freed before other blocks build theirs, and neighbours share what both refer to.

        Args:
            in_flight: Microbatches in flight.
            limit: Bytes of the stage.
        """
        if limit <= 0:
            return None
        step, tables = _step(limit), [np.zeros(limit // _step(limit) + 1)]
        for b in range(start, end):
            tables.append(self._extended(tables[-1], b, in_flight, step))
        if np.isinf(tables[-1][-1]):
            return None
        place, keeps = int(np.argmin(tables[-1])), list[Keep]()
        for b in range(end - 1, start - 1, -1):
            before, now = tables[b - start : b - start + 2]
            for keep, size in sorted(self._sizes(b, in_flight, step), key=lambda option: -option[1]):
                if size <= place and np.isclose(before[place - size] + self.seconds[b][keep], now[place], rtol=1e-12):
                    keeps.append(keep)
                    place -= size
                    break
        return tuple(reversed(keeps))

    def times(self, blocks: range, in_flight: int, limit: int) -> Values:
        """Return the least time of each stage of some consecutive blocks, given the first and the one after the last of them.

        Blocks are counted from the first of ``blocks``. The time of a stage that does not fit is infinite.
        """
        found, first = np.full((len(blocks) + 1, len(blocks) + 1), np.inf), 0
        if limit <= 0:
            return found
        step = _step(limit)
        tables = np.zeros((len(blocks), limit // step + 1))
        for i, b in enumerate(blocks):  # row s has what _extended returns for the stage that begins with block s
            own = tables[first : i + 1] = self._extended(tables[first : i + 1], b, in_flight, step)
            found[first : i + 1, i + 1] = own[:, -1]
            first += int(np.isinf(own[:, -1]).sum())  # a stage that begins before one that doesn't fit doesn't fit either
        return found

    def _extended(self, times: Values, b: int, in_flight: int, step: int) -> Values:
        """Return the least times within 0, 1, 2, … steps (last dimension) of stages with one more block, given those without it."""
        found, count = np.full_like(times, np.inf), times.shape[-1]
        for keep, size in self._sizes(b, in_flight, step):
            if size < count:
                longer = times[..., : count - size] + self.seconds[b][keep]
                np.minimum(found[..., size:], longer, out=found[..., size:])
        return found

    def _sizes(self, b: int, in_flight: int, step: int) -> list[tuple[Keep, int]]:
        own = self.memory[b]
        return [(keep, -(-(own.fixed + in_flight * size) // step)) for keep, size in own.stored.items()]

    def additive(self, start: int, keeps: Sequence[Keep], in_flight: int) -> int:
        """Return the bytes of a stage of blocks from ``start`` on, as far as they add up."""
        owned = zip(self.memory[start:], keeps, strict=False)
        return sum(own.fixed + in_flight * own.stored[keep] for own, keep in owned)


def tune_keeps(
    blocks: Sequence[BlockCost],
    memory: Sequence[BlockMemory],
    method: Method,
    k: int,
    stages: int | Sequence[int],
    devices: Sequence[Device],
    predict: Predict,
    key: str,
    *,
    tune_delay: bool = False,
    link: Link | Sequence[Connection] = INSTANT,
    processes: Sequence[range] | None = None,
    transport: TransportName = "auto",
    device_type: str = "cpu",
) -> Found:
    """Choose what each block stores, and the partition and the delays if they are to be chosen.

    Args:
        blocks: Cost of each block.
        memory: Bytes of each block; its keys are what the block may store. The last block of a stage may also store its input.
        stages: Number of stages, to be partitioned; or the number of blocks in each.
        devices: Device of each stage.
        predict: Predicts the memory of each stage.
        key: Setting that an error names.
        tune_delay, link, processes, transport, device_type: As for :func:`petra.cost_model.autotune.tune`. With ``tune_delay``, the
            search is made for a delay of 1, and repeated for the delays that suffice for its result, :data:`DELAYS` times at most:
            larger delays hide more, but leave less memory. The fastest result counts, and of about equal ones the least stale.

    Returns:
        The setting and the memory of its stages.

    Raises:
        ConfigError: If no setting fits the memory of the devices.
    """
    count = stages if isinstance(stages, int) else len(stages)
    seconds = [
        {keep: sum(block.seconds(keep)) + block.update / k for keep in own.stored}
        for block, own in zip(blocks, memory, strict=True)
    ]

    def search(method: Method) -> Found:
        found = _Search(blocks, Choices(seconds, memory), method, k, stages, devices, predict)
        return found.with_graphs(*found.with_inputs(*found.best(key)))

    if not tune_delay or count == 1:
        return search(method)
    rules: dict[str, Any] = {"link": link, "processes": processes, "transport": transport, "device_type": device_type}
    return _with_delays(search, method, k, count, rules)


def _with_delays(search: Callable[[Method], Found], method: Method, k: int, count: int, rules: Mapping[str, Any]) -> Found:
    """Return the fastest result of searches for different delays."""
    found, delays = dict[tuple[int, ...], Found](), (largest_delay(method, k, count, 1),) * (count - 1)
    while delays not in found:
        try:
            found[delays] = search(replace(method, delay=delays))
        except ConfigError:
            if not found:
                raise
            break  # larger delays leave too little memory
        if len(found) < DELAYS:
            delays = choose_delays(found[delays][0].costs, method, k, **rules)
    periods = {own: period_of(tuned.costs, method, k, own, **rules) for own, (tuned, _) in found.items()}
    longest = (1 + TOLERANCE) * min(periods.values())
    close = [own for own, period in periods.items() if period <= longest]
    return found[min(close, key=lambda own: sum(replace(method, delay=own).delays(count, k)))]


@dataclass(frozen=True)
class _Search:
    """The search of :func:`tune_keeps` for given delays. Attributes are its arguments."""

    blocks: Sequence[BlockCost]
    choices: Choices
    method: Method
    k: int
    stages: int | Sequence[int]
    devices: Sequence[Device]
    predict: Predict

    def best(self, key: str) -> Found:
        """Return the fastest setting that fits, among those of several searches, and the memory of its stages.

        Raises:
            ConfigError: If none fits.
        """
        choices, devices, count = self.choices, self.devices, len(self.devices)
        flights = [in_flight(delay, self.k, self.method.flush) for delay in self.method.delays(count, self.k)]
        enough = 2 * sum(own.fixed + max(flights) * max(own.stored.values()) for own in choices.memory) + 1
        smallest = [replace(own, stored=dict([min(own.stored.items(), key=lambda item: item[1])])) for own in choices.memory]
        partition, keeps = self._fastest(replace(choices, memory=smallest), flights, [enough] * count)
        best, seen = None, set[object]()
        needed: Sequence[PredictedMemory] = ()
        for _ in range(SEARCHES):
            tuned = self._tuned(partition, keeps)
            if (tuned.stages, tuned.keep) in seen:
                break
            seen.add((tuned.stages, tuned.keep))
            needed = self.predict(tuned)
            if all(self._fit(needed)) and (best is None or max(tuned.seconds) < max(best[0].seconds)):
                best = tuned, needed
            own = zip(partition, keeps, flights, strict=True)
            additive = [choices.additive(part.start, kept, flight) for part, kept, flight in own]
            other = [need.total - size for need, size in zip(needed, additive, strict=True)]  # what is not counted for each block
            try:
                limits = [int(min(device.memory - size, enough)) for device, size in zip(devices, other, strict=True)]
                partition, keeps = self._fastest(choices, flights, limits)
            except ConfigError:
                break
        if best is None:
            worst, given = max(need.total for need in needed), min(device.memory for device in devices)
            raise invalid(key, f"at least about {worst / 1e9:.3g} GB for a stage", f"{given / 1e9:.3g} GB")
        return best

    def with_inputs(self, tuned: Tuned, memory: Sequence[PredictedMemory]) -> Found:
        """Let the last blocks of stages store their input instead of nothing where it fits: the next stage then returns no x̃."""
        partition, keep = partition_of(tuned.stages), tuned.keep
        assert keep is not None
        ends = [part.stop - 1 for part in partition[:-1] if keep[part.stop - 1] is Keep.NOTHING]
        while ends:
            changed = tuple(Keep.INPUT if b in ends else own for b, own in enumerate(keep))
            found = self._tuned(partition, [changed[part.start : part.stop] for part in partition])
            fits = self._fit(needed := self.predict(found))
            if all(fits):
                return found, needed
            fewer = [b for b in ends if all(fit or b not in part for part, fit in zip(partition, fits, strict=True))]
            ends = fewer if len(fewer) < len(ends) else []
        return tuned, memory

    def with_graphs(self, tuned: Tuned, memory: Sequence[PredictedMemory]) -> Found:
        """Let each of the slowest stages store one more graph, as long as it fits: bytes that graphs share were counted twice."""
        partition, seconds = partition_of(tuned.stages), self.choices.seconds
        while True:
            assert tuned.keep is not None
            keep, slowest = [*tuned.keep], max(tuned.seconds)
            for part, own in zip(partition, tuned.seconds, strict=True):
                stored = (b for b in part if Keep.GRAPH in seconds[b] and keep[b] is not Keep.GRAPH)
                saved = {b: max(seconds[b].values()) - seconds[b][Keep.GRAPH] for b in stored}
                if own >= slowest * (1 - NEARLY) and max(saved.values(), default=0.0) > 0:
                    keep[max(saved, key=lambda b: (saved[b], b))] = Keep.GRAPH
            found = self._tuned(partition, [tuple(keep[part.start : part.stop]) for part in partition])
            if max(found.seconds) >= slowest or not all(self._fit(needed := self.predict(found))):
                return tuned, memory
            tuned, memory = found, needed

    def _fit(self, needed: Sequence[PredictedMemory]) -> list[bool]:
        return [need.total <= device.memory for need, device in zip(needed, self.devices, strict=True)]

    def _fastest(
        self, choices: Choices, flights: Sequence[int], limits: Sequence[int]
    ) -> tuple[list[range], list[tuple[Keep, ...]]]:
        """Return the partition whose slowest stage is fastest, and what the blocks of each stage store.

        Raises:
            ConfigError: If no partition fits.
        """
        items, spare = len(self.blocks), len(self.blocks) - len(self.devices)

        @cache
        def times(j: int) -> Values:  # every stage before and after it has a block
            found: Values = choices.times(range(j, j + spare + 1), flights[j], limits[j]) / self.devices[j].speed
            return found

        def seconds(starts: Indices, ends: Indices, j: int) -> Values:
            found: Values = times(j)[starts - j, ends - j]
            return found

        partition = best_partition(items, self.stages, seconds) if isinstance(self.stages, int) else partition_of(self.stages)
        keeps = []
        for part, flight, limit in zip(partition, flights, limits, strict=True):
            if (own := choices.fastest(part.start, part.stop, flight, limit)) is None:
                raise ConfigError("no setting fits")
            keeps.append(own)
        return partition, keeps

    def _tuned(self, partition: Sequence[range], keeps: Sequence[tuple[Keep, ...]]) -> Tuned:
        """Return the setting with the costs of its stages. The plan may let blocks at the end store graphs."""
        keep, speeds = tuple(own for part in keeps for own in part), [device.speed for device in self.devices]
        return replace(setting_of(self.blocks, partition, replace(self.method, keep=keep), self.k, speeds), keep=keep)


def _step(limit: int) -> int:
    """Return the bytes of a step of a stage's memory."""
    return max(1, -(-limit // STEPS))
