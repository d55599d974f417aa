"""The choice of what blocks store, against all choices tried one by one."""

import random
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch

from petra import ConfigError, Recipe, TensorSpec, make_plan
from petra.cost_model.autotune import Tuned, setting_of
from petra.cost_model.costs import BlockCost, count_blocks
from petra.cost_model.keeps import BlockMemory, count_memory, tune_keeps
from petra.cost_model.machines import Device
from petra.cost_model.memory import PredictedMemory, predict_memory
from petra.cost_model.simulator import predict
from petra.cost_model.stage_memory import Known
from petra.method import Keep, Method
from petra.models import revgpt
from petra.plan.messages import Boundary
from petra.plan.partition import partition_of
from petra.plan.timetable import in_flight
from tests.support.nets import sgd

EMPTY = Boundary((), ())


def case(draw: random.Random) -> dict[str, Any]:
    """Return a random problem: at most five blocks, integers as times and bytes."""
    count = draw.randint(2, 5)
    blocks, memory = [], []
    for b in range(count):
        forward, reversible = draw.randint(1, 5), draw.random() < 0.7 or b == count - 1  # a plan decides for others at the end
        keep = Keep.NOTHING if reversible else Keep.INPUT
        blocks.append(BlockCost(f"b{b}", reversible, dict.fromkeys(Keep, EMPTY), forward, 3 * forward, forward, 2 * forward))
        small = draw.randint(0, 3)
        memory.append(BlockMemory(draw.randint(0, 4), {keep: small, Keep.GRAPH: small + draw.randint(0, 6)}))
    stages = draw.randint(1, min(3, count))
    devices = [Device(draw.choice((0.5, 1.0)), draw.randint(5, 60)) for _ in range(stages)]
    delay = draw.choice((0, 1, 2))
    return {"blocks": blocks, "memory": memory, "method": Method("x", delay, Keep.NOTHING), "stages": stages, "devices": devices}


def used(problem: dict[str, Any], ends: tuple[int, ...], keeps: tuple[Keep, ...]) -> list[int]:
    """Return the bytes of each stage that ends before the blocks ``ends``."""
    count, starts = len(ends), (0, *ends[:-1])
    flights = [in_flight(delay, 1, False) for delay in problem["method"].delays(count, 1)]
    ranges = zip(starts, ends, flights, strict=True)
    memory = problem["memory"]

    def stored(b: int) -> int:  # a reversible block at the end of a stage may also store its input
        return memory[b].stored[keeps[b]] if keeps[b] in memory[b].stored else memory[b].stored[Keep.NOTHING] + 2

    return [sum(memory[b].fixed + n * stored(b) for b in range(a, z)) for a, z, n in ranges]


def slowest(problem: dict[str, Any], ends: tuple[int, ...], keeps: tuple[Keep, ...]) -> float:
    ranges = zip((0, *ends[:-1]), ends, problem["devices"], strict=True)
    return max(sum(sum(problem["blocks"][b].seconds(keeps[b])) for b in range(a, z)) / device.speed for a, z, device in ranges)


def brute_force(problem: dict[str, Any]) -> float | None:
    """Return the time of the slowest stage in the best of all settings that fit."""
    count, best = len(problem["blocks"]), None
    for inner in combinations(range(1, count), problem["stages"] - 1):
        ends = (*inner, count)
        for keeps in product(*(own.stored for own in problem["memory"])):
            sizes = used(problem, ends, keeps)
            if all(size <= device.memory for size, device in zip(sizes, problem["devices"], strict=True)):
                time = slowest(problem, ends, keeps)
                best = time if best is None else min(best, time)
    return best


def chosen(problem: dict[str, Any], **settings: Any) -> Tuned:
    def needed(tuned: Tuned) -> list[PredictedMemory]:
        assert tuned.keep is not None
        ends = tuple(sum(tuned.stages[: j + 1]) for j in range(len(tuned.stages)))
        sizes = used(problem | {"method": replace(problem["method"], delay=tuned.delay)}, ends, tuned.keep)
        return [PredictedMemory(size, 0, 0, 0, 0, workspace=0) for size in sizes]

    arguments = (problem[name] for name in ("blocks", "memory", "method"))
    return tune_keeps(*arguments, 1, problem["stages"], problem["devices"], needed, "trainer.memory_limit", **settings)[0]


def test_the_choice_is_as_fast_as_the_best_of_all() -> None:
    draw, fitting = random.Random(0), 0
    for _ in range(200):
        problem = case(draw)
        expected = brute_force(problem)
        if expected is None:
            with pytest.raises(ConfigError, match=r"^trainer\.memory_limit: expected at least"):
                chosen(problem)
            continue
        fitting += 1
        found = chosen(problem)
        ends = tuple(sum(found.stages[: j + 1]) for j in range(len(found.stages)))
        assert found.keep is not None
        assert slowest(problem, ends, found.keep) == pytest.approx(expected)
        sizes = used(problem, ends, found.keep)
        assert all(size <= device.memory for size, device in zip(sizes, problem["devices"], strict=True))
    assert 100 < fitting < 200


def test_with_chosen_delays_it_is_as_fast_as_with_any_one_delay() -> None:
    """A larger delay hides the way of a microbatch to the last stage and back, and leaves less memory for graphs."""
    draw, delays = random.Random(1), set[object]()
    for _ in range(40):
        problem = case(draw)
        periods, count = [], problem["stages"]
        for delay in (1, 2):
            with suppress(ConfigError):
                found = chosen(problem | {"method": Method("x", delay, Keep.NOTHING)})
                periods.append(predict(found.costs, Method("x", delay, Keep.NOTHING), 1, transport="edge").period)
        if count > 1 and periods:
            found = chosen(problem, tune_delay=True, transport="edge")
            assert predict(found.costs, Method("x", found.delay, Keep.NOTHING), 1, transport="edge").period <= 1.011 * min(periods)
            delays.add(found.delay)
    assert len(delays) > 3


def test_memory_that_does_not_add_up_is_found_by_the_prediction() -> None:
    """Three blocks in one stage, whose messages need 10 bytes more than the blocks."""
    blocks = [BlockCost(f"b{b}", True, dict.fromkeys(Keep, EMPTY), 1.0, 3.0, 1.0, 2.0) for b in range(3)]
    memory = [BlockMemory(1, {Keep.NOTHING: 0, Keep.GRAPH: 4}) for _ in blocks]

    def predict(tuned: Tuned) -> list[PredictedMemory]:
        assert tuned.keep is not None
        return [PredictedMemory(13 + 4 * tuned.keep.count(Keep.GRAPH), 0, 0, 0, 0, workspace=0)]

    for limit, graphs in ((13, 0), (17, 1), (20, 1), (25, 3), (float("inf"), 3)):
        found, needed = tune_keeps(blocks, memory, Method("x", 0, Keep.NOTHING), 1, 1, [Device(1.0, limit)], predict, "key")
        assert found.keep is not None
        assert found.keep.count(Keep.GRAPH) == graphs, limit
        assert needed[0].total <= limit
    with pytest.raises(ConfigError, match="key: expected at least about"):
        tune_keeps(blocks, memory, Method("x", 0, Keep.NOTHING), 1, 1, [Device(1.0, 12)], predict, "key")


def test_the_choice_is_no_slower_than_what_fits_by_hand() -> None:
    """Graphs of neighbouring blocks share tensors, and those at the end of a stage are freed before others are built."""
    model, inputs, known = revgpt(16, dim=16, depth=8, heads=2, size=16), TensorSpec((4, 16), torch.int64), Known()
    targets, method, recipe = TensorSpec((64,), torch.int64), Method("petra", 1, Keep.NOTHING), Recipe(sgd)
    blocks = count_blocks(model, inputs)

    def predict(keep: tuple[Keep, ...]) -> list[PredictedMemory]:
        plan = make_plan(model, inputs, method=replace(method, keep=keep), k=4, stages=[5, 5], processes=2)
        return predict_memory(plan, recipe, targets, known)

    memory = count_memory(make_plan(model, inputs, method=method, k=4, stages=[5, 5], processes=2), recipe, targets, known)
    for graphs in (1, 3):
        own = [Keep.NOTHING] * (4 - graphs) + [Keep.GRAPH] * graphs
        keep = (Keep.INPUT, *own, *own, Keep.GRAPH)
        devices = [Device(memory=found.total) for found in predict(keep)]
        found, needed = tune_keeps(blocks, memory, method, 4, [5, 5], devices, lambda tuned: predict(tuned.keep or ()), "key")
        by_hand = setting_of(blocks, partition_of([5, 5]), replace(method, keep=keep), 4, [1.0, 1.0])
        assert max(found.seconds) <= max(by_hand.seconds) * (1 + 1e-9), graphs
        assert all(need.total <= device.memory for need, device in zip(needed, devices, strict=True))
