"""Partitions and delays chosen by auto-tuning, the search within memory limits, and block costs against expected values."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from petra import METHODS, ConfigError, Keep, Method, Model, TensorSpec, make_plan
from petra.cost_model.autotune import Tuned, choose_delays, search_within, tune
from petra.cost_model.costs import BlockCost, StageCost, count_blocks, pipeline_costs, profile_blocks
from petra.cost_model.machines import Device, Link
from petra.cost_model.memory import PredictedMemory
from petra.models import revnet18
from petra.plan.messages import Boundary, boundary
from petra.plan.partition import partition_of
from petra.plan.transport import simulated_transport
from petra.settings import Numerics
from tests.support.nets import RandomSource, mixed_net, sgd
from tests.support.refusals import refuses

PETRA = METHODS["petra"]


def block(seconds: float = 1.0) -> BlockCost:
    return BlockCost("b", True, dict.fromkeys(Keep, Boundary((), ())), seconds, 3 * seconds, seconds, 2 * seconds)


@pytest.mark.parametrize("message_format", [None, "bf16"])
@pytest.mark.parametrize("graphs", [(), (0, 3), tuple(range(10))])
def test_messages_are_those_of_the_boundaries(graphs: tuple[int, ...], message_format: str | None) -> None:
    """What a stage sends back depends on what the previous stage stores, not on its own blocks."""
    model, inputs = revnet18(width=0.0625, stem="cifar"), TensorSpec((2, 3, 32, 32), torch.float32)
    numerics = Numerics(message_format=message_format)
    blocks, profiles = count_blocks(model, inputs, numerics), model.profile(inputs)
    smallest = [Keep.NOTHING if b.reversible else Keep.INPUT for b in blocks]
    keeps = [[Keep.GRAPH if i in graphs else keep] for i, keep in enumerate(smallest)]
    costs = pipeline_costs([[b] for b in blocks], keeps)
    assert costs[0].backward_bytes == 0
    for profile, (keep,), before, after in zip(profiles[:-1], keeps[:-1], costs[:-1], costs[1:], strict=True):
        messages = boundary(profile.outputs, keep, numerics, metrics=1)
        assert (before.forward_bytes, after.backward_bytes) == (messages.forward_bytes, messages.backward_bytes)


def test_stages_before_the_first_trained_parameter_only_run_forward() -> None:
    inputs, frozen = TensorSpec((2, 3, 32, 32), torch.float32), nn.Conv2d(3, 3, 1).requires_grad_(False)
    layers = {"a": frozen, "b": deepcopy(frozen), "c": nn.Conv2d(3, 3, 1), "d": deepcopy(frozen)}
    blocks = count_blocks(model := Model.of("mine", layers), inputs)
    for sizes, backward in (([1, 1, 1, 1], [0, 0, 3, 3]), ([1, 2, 1], [0, 3, 3])):
        costs = pipeline_costs([blocks[part.start : part.stop] for part in partition_of(sizes)], [[Keep.INPUT] * n for n in sizes])
        plan = make_plan(model, inputs, method="dsp", stages=sizes)
        assert [cost.backward_bytes for cost in costs[1:]] == [each.backward_bytes for each in plan.boundaries]
        assert [cost.backward / cost.forward for cost in costs] == backward


@pytest.mark.parametrize("method", [METHODS["pipedream_2bw"], replace(PETRA, max_updates=1)], ids=["double", "paci"])
def test_a_small_k_limits_the_delays(method: Method) -> None:
    found = tune(count_blocks(mixed_net(), RandomSource().spec), method, 4, 4, tune_delay=True)
    assert isinstance(found.delay, tuple)
    assert sum(found.delay) <= 4
    assert sum(choose_delays([StageCost(1, 3)] * 4, method, 8)) <= 8


def test_what_is_given_is_not_changed() -> None:
    assert tune([block(1 + i) for i in range(6)], PETRA, 1, [1, 4, 1], tune_delay=True).stages == (1, 4, 1)
    assert choose_delays([StageCost(1, 3)], PETRA, 1) == ()  # one stage needs no delay


def test_slow_devices_get_fewer_blocks() -> None:
    tuned = tune([block()] * 12, PETRA, 1, 3, speeds=[1.0, 0.5, 1.5])
    assert tuned.stages == (4, 2, 6)
    assert [cost.forward for cost in tuned.costs] == [4, 4, 4]
    assert tuned.seconds == (16, 16, 16)
    with pytest.raises(ConfigError, match=r"^trainer\.stages: no partition into 2 parts"):
        tune([block()] * 12, PETRA, 1, 2, limits=[10.0, 30.0])


def within(memory: Sequence[float], need: Callable[[int], float], stages: int | Sequence[int] = 3) -> tuple[tuple[int, ...], int]:
    """Return the partition of 12 blocks within a memory, given what some blocks need, and the number of partitions tried."""
    tried: list[Tuned] = []

    def predicted(tuned: Tuned) -> list[PredictedMemory]:
        tried.append(tuned)
        return [PredictedMemory(0, 0, 0, int(need(count)), 0, 0) for count in tuned.stages]

    devices = [Device(memory=size) for size in memory]
    found, needed = search_within(devices, partial(tune, [block()] * 12, PETRA, 1, stages), predicted, "memory", "device")
    assert [part.total for part in needed] == [int(need(count)) for count in found.stages]
    return found.stages, len(tried)


def test_the_fastest_partition_that_fits_comes_first_and_stages_that_need_too_much_get_fewer_blocks() -> None:
    assert within([40, 40, 40], lambda count: 10 * count) == ((4, 4, 4), 1)
    for memory, fixed, expected in (
        ([20, 100, 100], 0, (2, 5, 5)),
        ([20, 30, 100], 0, (2, 3, 7)),
        ([75, 200, 65], 50, (2, 9, 1)),
        ([20, 50, 50], 0, (2, 5, 5)),
    ):
        assert within(memory, lambda count, fixed=fixed: fixed + 10 * count)[0] == expected  # type: ignore[misc]


test_limits_that_nothing_meets = refuses(
    within,
    ([20, 35, 50], lambda count: 10 * count, r"^memory: expected at least \S+ GB for device \d, got \S+ GB$"),
    ([1000, 5000, 5000], lambda count: 1000 + 10 * count, r"^memory: expected at least 1\.01e-06 GB for device 1, got 1e-06 GB$"),
    ([50, 60], lambda count: 10 * count, [6, 6], r"^memory: expected at least 6e-08 GB for device 1, got 5e-08 GB$"),
)


def test_the_transport_depends_on_the_processes_and_not_on_their_stages() -> None:
    assert simulated_transport("auto", (1,) * 71, processes=2) == "edge"
    assert simulated_transport("auto", (1,) * 71) == "lockstep"
    costs = [StageCost(1.0, 3.0, 0.0, 8, 8, 0)] * 72
    halves = [range(36), range(36, 72)]
    assert len(choose_delays(costs, PETRA, 4, link=Link(1e9, 0.0), processes=halves, transport="edge")) == 71


def test_counted_costs() -> None:
    costs = count_blocks(mixed_net(), RandomSource().spec)
    conv = 2 * 4 * 8 * 8 * 4 * 4 * 9  # batch, positions, channels in and out, 3x3
    assert (costs[1].forward, costs[1].backward, costs[1].graph_backward) == (conv, 3 * conv, 2 * conv)
    assert costs[1].seconds(Keep.GRAPH) == (conv, 2 * conv)
    assert [costs[1].boundaries[keep].backward_bytes // (4 * 4 * 64 * 8) for keep in (Keep.INPUT, Keep.NOTHING)] == [2, 4]


def test_measured_costs_are_those_of_the_pipelines_code() -> None:
    measured = profile_blocks(mixed_net(), RandomSource().spec, optimizer=sgd, rounds=1)
    assert [c.name for c in measured] == ["stem", "block1", "down", "block2", "block3", "head"]
    assert all(t > 0 for c in measured for t in (c.forward, c.backward, c.graph_forward, c.graph_backward, c.update))
    assert [block.trained for block in mixed_net().profile(RandomSource().spec)] == [
        sum(p.numel() for p in mixed_net().build_block(b, 0).parameters()) for b in range(6)
    ]
    with pytest.raises(Exception, match="no such backend"):
        profile_blocks(mixed_net(), RandomSource().spec, optimizer=sgd, rounds=1, compile="no such backend")
    assert [c.boundaries for c in measured] == [c.boundaries for c in count_blocks(mixed_net(), RandomSource().spec)]
