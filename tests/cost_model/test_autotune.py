"""Partitions, delays and keeps chosen by auto-tuning against brute force; block costs against expected values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random

import pytest
import torch

from petra import METHODS, ConfigError, Keep, Method, TensorSpec
from petra.cost_model.autotune import choose_keeps, search_within, tune
from petra.cost_model.costs import BlockCost, StageCost, count_blocks, pipeline_costs, profile_blocks, stage_cost
from petra.cost_model.delays import choose_delays
from petra.cost_model.machines import Link
from petra.cost_model.memory import PredictedMemory
from petra.cost_model.simulator import predict
from petra.errors import invalid
from petra.models import revnet18
from petra.plan.messages import boundary
from petra.plan.timetable import in_flight
from petra.settings import Numerics
from tests.support.nets import RandomSource, make_pipeline, mixed_net

PETRA = METHODS["petra"]


def random_blocks(random: Random, count: int) -> list[BlockCost]:
    blocks = []
    for i in range(count):
        forward, stream_bytes = random.uniform(0.5, 2), random.randint(1, 9)
        blocks.append(
            BlockCost(
                name=f"b{i}",
                reversible=random.random() < 0.6,
                forward=forward,
                backward=3 * forward,
                graph_forward=forward,
                graph_backward=random.uniform(1.8, 2.5) * forward,
                update=0.0,
                input_bytes=stream_bytes,
                output_bytes=stream_bytes,
                graph_bytes=stream_bytes + random.randint(1, 30),
                parameter_bytes=random.randint(0, 20),
            )
        )
    return blocks


@pytest.mark.parametrize("seed", range(15))
def test_keeps_against_all_choices(seed: int) -> None:
    random = Random(seed)
    blocks = random_blocks(random, random.randint(1, 7))
    smallest = [Keep.NOTHING if b.reversible else Keep.INPUT for b in blocks]
    microbatches = random.randint(1, 5)
    sizes = [stage_cost(blocks, keeps) for keeps in (smallest, [Keep.GRAPH] * len(blocks))]
    low, high = (cost.memory(microbatches) for cost in sizes)
    limit = random.uniform(low, max(high, low + 1))

    def time_and_size(keeps: tuple[Keep, ...]) -> tuple[float, int]:
        cost = stage_cost(blocks, keeps)
        return cost.forward + cost.backward, cost.memory(microbatches)

    options = list(product(*[(k, Keep.GRAPH) for k in smallest]))
    best = min(time_and_size(o)[0] for o in options if time_and_size(o)[1] <= limit)
    seconds, size = time_and_size(choose_keeps(blocks, smallest, microbatches, limit))
    assert seconds == pytest.approx(best)
    assert size <= limit


def test_reconstruct_only_as_much_as_memory_demands() -> None:
    blocks = random_blocks(Random(3), 5)
    smallest = [Keep.NOTHING if b.reversible else Keep.INPUT for b in blocks]
    assert choose_keeps(blocks, smallest, 3, float("inf")) == (Keep.GRAPH,) * 5
    assert choose_keeps(blocks, smallest, 3, 0) == tuple(smallest)


@pytest.mark.parametrize("graphs", [(), (0, 3), tuple(range(10))])
def test_messages_are_those_of_the_boundaries(graphs: tuple[int, ...]) -> None:
    """What a stage sends back depends on what the previous stage stores, not on its own blocks."""
    model, inputs = revnet18(width=0.0625, stem="cifar"), TensorSpec((2, 3, 32, 32), torch.float32)
    blocks, profiles = count_blocks(model, inputs), model.profile(inputs)
    smallest = [Keep.NOTHING if b.reversible else Keep.INPUT for b in blocks]
    keeps = [[Keep.GRAPH if i in graphs else keep] for i, keep in enumerate(smallest)]
    costs = pipeline_costs([[b] for b in blocks], keeps)
    assert costs[0].backward_bytes == 0
    for profile, (keep,), before, after in zip(profiles[:-1], keeps[:-1], costs[:-1], costs[1:], strict=True):
        forward, (streams, gradients, _) = boundary(profile.outputs, keep, Numerics(), metrics=1)
        assert before.forward_bytes == sum(t.bytes for part in forward for t in part)
        assert after.backward_bytes == sum(t.bytes for t in (*streams, *gradients))


def test_double_weights_limit_the_delays() -> None:
    delays = choose_delays([StageCost(1, 3)] * 4, METHODS["pipedream_2bw"], 8)
    assert sum(delays) <= 8


@pytest.mark.parametrize("method", [METHODS["pipedream_2bw"], replace(METHODS["petra"], max_updates=1)], ids=["double", "paci"])
def test_a_small_k_limits_the_delays(method: Method) -> None:
    blocks = count_blocks(mixed_net(), RandomSource().spec)
    found = tune(blocks, method, 4, 4, tune_delay=True)
    assert isinstance(found.delay, tuple)
    assert sum(found.delay) <= 4


@pytest.mark.parametrize(("latency", "expected"), [(0.0, (1, 1, 1)), (0.45, (2, 2, 2))])
def test_delays_of_equal_stages(latency: float, expected: tuple[int, ...]) -> None:
    """With fast links d = 1 suffices. If the notice of a receive and the message take less than F, d = 2 suffices."""
    found = choose_delays([StageCost(1, 3)] * 4, PETRA, 1, link=Link(latency=latency))
    assert all(d <= e for d, e in zip(found, expected, strict=True))
    best = predict([StageCost(1, 3)] * 4, replace(PETRA, delay=4), link=Link(latency=latency)).period
    assert predict([StageCost(1, 3)] * 4, replace(PETRA, delay=found), link=Link(latency=latency)).period <= 1.01 * best
    if latency == 0:
        assert found == expected


def test_one_process_needs_no_delay() -> None:
    assert choose_delays([StageCost(1, 3)], PETRA, 1) == ()


def test_tuned_pipeline_trains_and_fits() -> None:
    model, data = mixed_net(), RandomSource()
    blocks = count_blocks(model, data.spec)
    limit = 120e3
    tuned = tune(blocks, PETRA, 2, 3, tune_delay=True, tune_keep=True, limit=limit)
    assert sum(tuned.stages) == 6
    assert tuned.imbalance >= 1
    assert Keep.GRAPH in tuned.keep
    assert set(tuned.keep) != {Keep.GRAPH}
    method = Method("tuned", tuned.delay, tuned.keep)
    delays = method.delays(3, 2)
    assert all(cost.memory(in_flight(d, 2, False)) <= limit for cost, d in zip(tuned.costs, delays, strict=True))
    pipeline = make_pipeline(model, data.spec, method=method, k=2, stages=tuned.stages, optimizer=partial(_sgd, lr=0.1))
    assert [keep for j in range(3) for keep in pipeline.plan.stages[j].keeps] == list(tuned.keep)
    pipeline.train(data, 9)


def test_given_stages_are_not_changed() -> None:
    blocks = random_blocks(Random(1), 6)
    tuned = tune(blocks, PETRA, 1, [1, 4, 1], tune_delay=True)
    assert tuned.stages == (1, 4, 1)
    assert tuned.keep is Keep.NOTHING


def test_memory_limits_that_nothing_meets() -> None:
    blocks = random_blocks(Random(2), 6)
    with pytest.raises(ConfigError, match=r"trainer\.stages: no partition into 2 parts"):
        tune(blocks, PETRA, 1, 2, limit=10)
    with pytest.raises(ConfigError, match=r"trainer\.memory_limit: expected at least .* GB for stage 1 .*, got 1e-08 GB"):
        tune(blocks, PETRA, 1, [3, 3], limit=10)


def test_counted_costs() -> None:
    costs = count_blocks(mixed_net(), RandomSource().spec)
    conv = 2 * 4 * 8 * 8 * 4 * 4 * 9  # batch, positions, channels in and out, 3x3
    assert (costs[1].forward, costs[1].backward, costs[1].graph_backward) == (conv, 3 * conv, 2 * conv)
    assert costs[1].stored_bytes(Keep.NOTHING) == 0
    assert costs[2].stored_bytes(Keep.NOTHING) == costs[2].input_bytes == 2 * 4 * 4 * 64 * 8
    assert costs[1].stored_bytes(Keep.GRAPH) == costs[1].graph_bytes > costs[1].input_bytes


def test_measured_costs_are_those_of_the_pipelines_code() -> None:
    measured = profile_blocks(mixed_net(), RandomSource().spec, optimizer=partial(_sgd, lr=0.1), rounds=1)
    assert [c.name for c in measured] == ["stem", "block1", "down", "block2", "block3", "head"]
    assert all(t > 0 for c in measured for t in (c.forward, c.backward, c.graph_forward, c.graph_backward, c.update))
    counted = count_blocks(mixed_net(), RandomSource().spec)
    for a, b in zip(measured, counted, strict=True):
        assert (a.input_bytes, a.graph_bytes, a.parameter_bytes) == (b.input_bytes, b.graph_bytes, b.parameter_bytes)


def _sgd(module: torch.nn.Module, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=lr)


Pair = tuple[float, float]
SMALLEST = 10.0


class Partitions:
    """Finds the largest sizes within the limits."""

    def __init__(self) -> None:
        self.searches = 0

    def search(self, limits: Sequence[float]) -> Pair:
        self.searches += 1
        if min(limits) < SMALLEST:
            raise invalid("size", f"at least {SMALLEST}", min(limits))
        return limits[0], limits[1]


def fitted(need: Callable[[float], float], limits: Pair) -> tuple[Pair, Partitions]:
    found = Partitions()

    def count(pair: Pair) -> list[PredictedMemory]:
        return [PredictedMemory(0, 0, 0, int(need(size)), 0, 0) for size in pair]

    pair, memory = search_within(limits, found.search, lambda pair: pair, count, "memory", "device")
    assert [counted.total for counted in memory] == [int(need(size)) for size in pair]
    return pair, found


def test_estimates_that_hold_need_one_search() -> None:
    pair, partitions = fitted(lambda size: 0.9 * size, (100.0, 60.0))
    assert (pair, partitions.searches) == ((100.0, 60.0), 1)


def test_the_estimate_becomes_smaller_by_the_excess() -> None:
    assert fitted(lambda size: size + 30, (100.0, 60.0))[0] == (70.0, 30.0)
    assert fitted(lambda size: 1.5 * size, (100.0, 60.0))[0] == (50.0, 30.0)
    assert fitted(lambda size: size + 30 * (size > 90), (100.0, 60.0))[0] == (70.0, 60.0)


def test_limits_that_nothing_meets() -> None:
    with pytest.raises(ConfigError, match=r"memory: expected at least 1\.12e-07 GB for device 2, got 6e-08 GB"):
        fitted(lambda size: size + 52, (100.0, 60.0))
    with pytest.raises(ConfigError, match=r"size: expected at least 10\.0, got 6\.0"):
        fitted(lambda size: size, (100.0, 6.0))
