"""Predictions against closed forms and against an independent model of the pipeline."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter
from random import Random

import pytest
import torch

from petra import METHODS, Keep, Method, TensorSpec
from petra.cost_model.costs import StageCost
from petra.cost_model.event_graph import ZB_H1
from petra.cost_model.machines import Link
from petra.cost_model.simulator import predict, simulate
from petra.diagnostics.events import Interval, Kind
from petra.models import revnet18
from petra.plan import make_plan
from petra.plan.timetable import Op
from tests.plan.test_timetable import training_order
from tests.support.refusals import refuses

NOTHING, GRAPH = StageCost(1, 3), StageCost(1, 2)
ONE_F_ONE_B = Method("1f1b", 1, Keep.GRAPH, flush=True)
GPIPE = Method("gpipe", 0, Keep.GRAPH, flush=True, fill=True)
TRANSPORTS = ("edge", "lockstep")


def seconds_by_kind(intervals: Iterable[Interval]) -> Mapping[tuple[int, Kind], float]:
    """Return the total time of each stage and kind of work."""
    totals = defaultdict[tuple[int, Kind], float](float)
    for interval in intervals:
        totals[interval.stage, interval.kind] += interval.stop - interval.start
    return totals


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stages", [1, 2, 5, 10])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_periods_of_equal_stages(stages: int, k: int, transport: str) -> None:
    """In units of a forward: PETRA 4 at d = 1 and d = 2, sequential stages 4J, synchronous pipelines 3(k + J − 1)/k."""

    def period(method: Method, cost: StageCost) -> float:
        return predict([cost] * stages, method, k, transport=transport).period  # type: ignore[arg-type]

    assert period(METHODS["petra"], NOTHING) == pytest.approx(4)
    assert period(Method("half", 1, Keep.NOTHING), NOTHING) == pytest.approx(4)
    assert period(METHODS["reversible"], NOTHING) == pytest.approx(4 * stages)
    assert period(METHODS["backprop"], GRAPH) == pytest.approx(3 * stages)
    assert period(ONE_F_ONE_B, GRAPH) == pytest.approx(3 * (k + stages - 1) / k)
    assert period(GPIPE, GRAPH) == pytest.approx(3 * (k + stages - 1) / k)


def test_zb_h1_runs_the_steps_of_the_paper() -> None:
    """Four stages and eight microbatches, Fig. 2 of Qi et al. 2024: stage j postpones W by j microbatches."""
    found = simulate([StageCost(1, 2, 1, weights=1)] * 4, ZB_H1, 8, 8)

    def steps(stage: int) -> str:
        own = sorted((i for i in found if i.stage == stage and i.kind is not Kind.WAIT), key=lambda i: i.start)
        return " ".join(f"{i.kind.value}{i.microbatch}" for i in own)

    update = f"{Kind.UPDATE.value}7"
    assert steps(0) == f"F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7 {update}"  # it sends nothing: B is whole
    assert steps(1) == f"F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7 {update}"
    assert steps(3) == f"F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7 {update}"


test_petra_does_not_train_with_zb_h1 = refuses(
    lambda method: make_plan(revnet18(), TensorSpec((4, 3, 32, 32), torch.float32), method=method, k=8),
    *((method, r"^method: expected petra, .* or \w+, got zb_h1$") for method in (ZB_H1, "zb_h1")),
)


def test_bubbles() -> None:
    found = predict([GRAPH] * 4, ONE_F_ONE_B, k=5)
    assert found.bubble == pytest.approx([1 - 5 / 8] * 4)
    unequal = predict([StageCost(1, 3), StageCost(2, 6), StageCost(1, 1)], METHODS["petra"])
    assert unequal.period == pytest.approx(8)
    assert unequal.bubble == pytest.approx([0.5, 0, 0.75])


def test_updates_count_once_in_k_and_stages_of_one_process_take_turns() -> None:
    assert predict([StageCost(1, 3, update=2)] * 3, METHODS["petra"], k=4).period == pytest.approx(4.5)
    for processes, expected in (([range(0, 4), range(4, 6)], 16), ([range(6)], 24)):
        assert predict([NOTHING] * 6, METHODS["petra"], processes=processes).period == pytest.approx(expected)


def test_messages_that_hide_behind_compute_cost_nothing() -> None:
    """At d = 2 a message has the other half of the tick to travel. At d = 1 the full latency counts, twice per tick at J = 2."""
    link = Link(latency=0.5)
    assert predict([NOTHING] * 4, METHODS["petra"], link=link).period == pytest.approx(4)
    assert predict([NOTHING] * 2, Method("half", 1, Keep.NOTHING), link=link).period == pytest.approx(4.5)
    assert predict([NOTHING] * 3, METHODS["reversible"], link=link).period == pytest.approx(12 + 4 * 0.5)


def test_a_receive_that_is_posted_with_its_send_costs_the_latency_twice() -> None:
    """Lockstep: a message is sent when the notice of its receive has arrived, and needed two rounds later. Edge: d + 1 receives are
    posted in advance, so the latency counts once in each direction, for d + 1 microbatches."""
    costs, link = [StageCost(1, 1)] * 2, Link(latency=10)
    assert predict(costs, METHODS["petra"], link=link, transport="lockstep").period == pytest.approx(2 * 10 + 1)
    for d in range(1, 6):
        assert predict(costs, Method("x", d, Keep.NOTHING), link=link).period == pytest.approx((2 * 10 + 4) / (d + 1))


def longest_paths(costs: list[StageCost], method: Method, k: int, microbatches: int) -> dict[tuple[Op, int, int], float]:
    """Return when each step ends if messages take no time: longest paths over the orders and messages."""
    before = dict[tuple[Op, int, int], list[tuple[Op, int, int]]]()
    for j, delay in enumerate(method.delays(len(costs), k)):
        steps = [(op, j, m) for op, m in training_order(delay, 0, microbatches, k if method.flush else None)]
        for step, previous in zip(steps, [None, *steps], strict=False):
            source = j - 1 if step[0] is Op.FORWARD else j + 1
            message = [(step[0], source, step[2])] if 0 <= source < len(costs) else []
            before[step] = message + ([previous] if previous else [])
    ends: dict[tuple[Op, int, int], float] = {}
    for step in TopologicalSorter(before).static_order():
        seconds = costs[step[1]].forward if step[0] is Op.FORWARD else costs[step[1]].backward
        ends[step] = max((ends[source] for source in before[step]), default=0.0) + seconds
    return ends


@pytest.mark.parametrize("seed", range(25))
def test_random_pipelines_against_longest_paths(seed: int) -> None:
    random = Random(seed)
    stages, k, microbatches = random.randint(1, 5), random.randint(1, 4), random.randint(1, 14)
    costs = [StageCost(random.uniform(0.5, 2), random.uniform(0.5, 4)) for _ in range(stages)]
    # With delays of at least 2, senders rarely wait for room.
    delays = tuple(random.randint(2, 4) for _ in range(stages - 1)) or 2
    method = Method("x", delays, Keep.NOTHING, flush=random.random() < 0.4)
    kinds = {Kind.FORWARD: Op.FORWARD, Kind.BACKWARD: Op.BACKWARD}
    simulated = simulate(costs, method, k, microbatches)
    found = {(kinds[i.kind], i.stage, i.microbatch): i.stop for i in simulated if i.kind in kinds}
    expected = longest_paths(costs, method, k, microbatches)
    assert found.keys() == expected.keys()
    # A sender may wait for its oldest message, so the simulation is never faster.
    assert all(found[node] >= expected[node] - 1e-9 for node in expected)
    if max(found.values()) != pytest.approx(max(expected.values())):
        waits = seconds_by_kind(simulated)
        assert any(waits[j, Kind.SEND] > 0 for j in range(stages))
