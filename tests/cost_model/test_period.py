"""The maximum cycle ratio against simulated runs, and the delays chosen with it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from petra import METHODS, Keep, Method
from petra.cost_model.autotune import TOLERANCE, choose_delays
from petra.cost_model.costs import StageCost
from petra.cost_model.event_graph import PREDICTED, ZeroBubble
from petra.cost_model.machines import INSTANT, Connection, Link, measure_link
from petra.cost_model.simulator import predict, simulate
from petra.diagnostics.events import Kind
from petra.plan.timetable import PeriodicRounds, Timetable
from petra.plan.transport import simulated_transport
from tests.support.processes import run_processes

Case = tuple[list[StageCost], Method, int, list[range], list[Connection], str]


@st.composite
def pipelines(draw: st.DrawFn) -> Case:
    stages = draw(st.integers(1, 6))
    seconds = draw(st.sampled_from([st.floats(0.5, 4), st.integers(1, 4)]))
    costs = [
        StageCost(
            draw(seconds),
            backward := draw(seconds),
            draw(st.sampled_from([0, 0, 1.3])),
            draw(st.integers(0, 20)),
            draw(st.integers(0, 40)),
            weights=backward * draw(st.sampled_from([0, 1 / 4, 1 / 2])),
        )
        for _ in range(stages)
    ]
    method = draw(st.sampled_from([*METHODS.values(), None]))
    if method is None or method.name in ("pipedream_2bw", "paci"):  # whose delays k limits
        delay = tuple(draw(st.lists(st.integers(0, 4), min_size=stages - 1, max_size=stages - 1)))
        method = Method("x", delay, Keep.NOTHING, flush=draw(st.booleans()))
    if method.flush and not method.fill and draw(st.booleans()):
        method = ZeroBubble(**vars(method))
    cuts = sorted(draw(st.sets(st.integers(1, stages - 1)))) if stages > 1 else []
    processes = [range(a, b) for a, b in zip([0, *cuts], [*cuts, stages], strict=True)]
    link = st.builds(Link, bandwidth=st.sampled_from([5.0, 40.0, float("inf")]), latency=st.sampled_from([0.0, 0.3, 1.7]))
    links = [Connection(draw(link), draw(link)) for _ in processes[1:]]
    return costs, method, draw(st.integers(1, 4)), processes, links, draw(st.sampled_from(["edge", "lockstep"]))


def simulated_period(case: Case) -> float | None:
    """Return the time per microbatch of a long simulation in which it repeats, or None if it doesn't yet."""
    costs, method, k, processes, links, transport = case
    delays = method.delays(len(costs), k)
    count = 30 * k + 4 * max(delays) + 60
    intervals = simulate(costs, method, k, count, processes=processes, link=links, transport=transport)  # type: ignore[arg-type]
    kinds = (Kind.BACKWARD, Kind.BACKWARD_WEIGHTS, Kind.UPDATE)
    done = {i.microbatch: i.stop for i in intervals if i.stage == 0 and i.kind in kinds}
    times = [done[m] for m in range(count // k * k - (0 if method.flush else k * -(-max(delays) // k)))]
    half = len(times) // 2
    for cycle in range(k, half + 1, k):
        steps = [times[-n] - times[-n - cycle] for n in range(1, half)]
        if max(steps) - min(steps) <= 1e-10 * times[-1]:
            return steps[0] / cycle
    return None


def predicted_period(case: Case) -> float:
    costs, method, k, processes, links, transport = case
    return predict(costs, method, k, processes=processes, link=links, transport=transport).period  # type: ignore[arg-type]


@settings(max_examples=120, deadline=None)
@given(pipelines())
def test_period_is_that_of_a_long_simulation(case: Case) -> None:
    expected = simulated_period(case)
    assume(expected is not None)
    assert predicted_period(case) == pytest.approx(expected, rel=1e-9)


CASES = [(name, transport) for name in ("petra", "1f1b", "gpipe") for transport in ("edge", "lockstep")]


@pytest.mark.parametrize(("name", "transport"), [*CASES, ("zb_h1", "edge")])
def test_period_of_many_stages_is_that_of_a_long_simulation(name: str, transport: str) -> None:
    """The period of graphs whose first edges are chosen phase by phase."""
    random = Random(name)
    costs = [StageCost(random.uniform(1, 2), random.uniform(2, 4), 0.3, 10, 20, weights=0.5) for _ in range(24)]
    link = [Connection(Link(40.0, random.uniform(0, 0.5)), Link(60.0, random.uniform(0, 0.5))) for _ in range(23)]
    case = (costs, PREDICTED[name], 16, [range(j, j + 1) for j in range(24)], link, transport)
    assert predicted_period(case) == pytest.approx(simulated_period(case), rel=1e-9)


def test_a_thousand_stages_are_planned_in_little_work() -> None:
    """Counts rounds, not seconds: the timetable of 1,000 stages repeats after about two rounds per stage and direction."""
    stages = 1000
    timetable = Timetable(range(2 * stages - 2, -1, -2), [2] * (stages - 1), 0, 2**40)
    rounds = sum(1 for _ in PeriodicRounds(timetable, 1, lambda round_: round_).until_steady())
    assert rounds <= 4 * stages
    assert predict([StageCost(1, 3)] * stages, METHODS["petra"], 8).period == pytest.approx(4, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_chosen_delays_keep_the_throughput_and_none_can_be_lowered(seed: int) -> None:
    random = Random(seed)
    spread = random.choice([0.0, 0.1, 0.5])
    costs = [
        StageCost(random.uniform(1 - spread, 1 + spread), random.uniform(3 - 3 * spread, 3 + 3 * spread), 0.4, 10, 20)
        for _ in range(random.randint(2, 14))
    ]
    link = random.choice([INSTANT, Link(latency=random.uniform(0, 1.5)), Link(random.uniform(10, 100), random.uniform(0, 0.5))])
    method, k = Method("x", 2, Keep.NOTHING, flush=seed % 5 == 0), random.randint(1, 4)

    def period(delays: Sequence[int]) -> float:
        transport = simulated_transport("auto", delays)
        return predict(costs, replace(method, delay=tuple(delays)), k, link=link, transport=transport).period

    found = choose_delays(costs, method, k, link=link)
    limit = (1 + TOLERANCE) * period([4] * len(found))
    assert period(found) <= limit
    for boundary, delay in enumerate(found):
        assert delay == 0 or period([*found[:boundary], delay - 1, *found[boundary + 1 :]]) > limit


def test_delays_of_many_stages() -> None:
    """Slow messages make cycles over many boundaries critical. Beyond a number of stages, all boundaries get the same delay."""
    costs, link = [StageCost(1, 3)] * 60, Link(latency=0.024)
    assert set(choose_delays(costs, METHODS["petra"], 1, link=link)) == {1, 2}
    assert set(choose_delays(costs + costs, METHODS["petra"], 1, link=link)) == {2}


@pytest.mark.processes
def test_all_processes_get_the_same_link(tmp_path: Path) -> None:
    first, *others = run_processes(3, measured_link, tmp_path)
    assert others == [first, first]
    assert 0 < first.latency < 1
    assert 0 < first.bandwidth < float("inf")


def measured_link(rank: int) -> Link:
    return measure_link(rounds=2, nbytes=1 << 16)
