from collections import deque
from collections.abc import Sequence
from itertools import product
from random import Random

import pytest

from petra import METHODS, ConfigError, Keep, Method, ScheduleError
from petra.plan.schedule import Op, evaluation_order, in_flight, timetable, training_order

F, B = Op.FORWARD, Op.BACKWARD


def method(delay: int | tuple[int, ...], flush: bool = False, fill: bool = False) -> Method:
    return Method("test", delay, Keep.NOTHING, flush=flush, fill=fill)


def orders(made: Method, stages: int, k: int, microbatches: int, start: int = 0) -> list[list[tuple[Op, int]]]:
    flush = k if made.flush else None
    return [list(training_order(delay, start, start + microbatches, flush)) for delay in made.delays(stages, k)]


def draw(delay: int, stages: int, microbatches: int) -> list[str]:
    rows: list[dict[int, str]] = [{} for _ in range(stages)]
    for step in timetable(orders(method(delay), stages, 1, microbatches), [delay] * (stages - 1)):
        rows[step.stage][step.round] = f"{step.op}{step.microbatch}"
    return [" ".join(row.get(i, "  ") for i in range(max(row) + 1)) for row in rows]


def test_petra_timetable() -> None:
    assert draw(2, 3, 5) == [
        "F0    F1    F2    F3    F4 B0    B1    B2    B3    B4",
        "      F0    F1    F2 B0 F3 B1 F4 B2    B3    B4",
        "            F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_timetable_with_delay_1() -> None:
    assert draw(1, 3, 4) == [
        "F0    F1    F2 B0 F3 B1    B2    B3",
        "   F0    F1 B0 F2 B1 F3 B2    B3",
        "      F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_timetable_without_delay() -> None:
    assert draw(0, 2, 2) == ["F0       B0 F1       B1", "   F0 B0       F1 B1"]


@pytest.mark.parametrize(("stages", "delays"), [(1, (0,)), (4, (6, 4, 2, 0)), (10, tuple(range(18, -1, -2)))])
def test_petra_delays(stages: int, delays: tuple[int, ...]) -> None:
    assert METHODS["petra"].delays(stages, k=3) == delays


def test_delays_of_boundaries_and_fill() -> None:
    assert method((0, 3, 1)).delays(4, 1) == (4, 4, 1, 0)
    assert method(0, flush=True, fill=True).delays(3, 5) == (4, 4, 4)
    with pytest.raises(ConfigError, match="3 delays"):
        method((0, 3, 1)).delays(3, 1)
    with pytest.raises(ConfigError, match=r"method\.delay"):
        method(-1)
    with pytest.raises(ConfigError, match=r"method\.fill"):
        method(0, fill=True)


@pytest.mark.parametrize(("delay", "microbatches"), [(0, 5), (3, 10), (6, 4), (2, 1)])
def test_order_has_the_delay_and_loses_nothing(delay: int, microbatches: int) -> None:
    order = list(training_order(delay, 7, 7 + microbatches))
    assert [m for op, m in order if op is F] == [m for op, m in order if op is B] == list(range(7, 7 + microbatches))
    for m in range(7, 7 + microbatches):
        between = order[order.index((F, m)) + 1 : order.index((B, m))]
        assert sum(op is F for op, _ in between) == min(delay, 7 + microbatches - 1 - m, microbatches)


def test_flush_drains_at_multiples_of_k() -> None:
    order = list(training_order(2, 1, 9, flush_every=4))
    in_flight = 0
    for op, m in order:
        in_flight += 1 if op is F else -1
        if op is B and (m + 1) % 4 == 0:
            assert in_flight == 0
    assert len(order) == 16


@pytest.mark.parametrize(("delay", "k", "flush"), [(0, 1, False), (4, 1, False), (6, 4, False), (5, 3, True), (2, 4, True)])
def test_in_flight_and_staleness_match_the_order(delay: int, k: int, flush: bool) -> None:
    order = list(training_order(delay, 0, 40 * k, k if flush else None))
    count, most, updates, staleness, forward_at = 0, 0, 0, [], {}
    for op, m in order:
        count += 1 if op is F else -1
        most = max(most, count)
        if op is F:
            forward_at[m] = updates
            continue
        if 10 * k <= m < 30 * k:
            staleness.append(updates - forward_at[m])
        updates += (m + 1) % k == 0
    assert in_flight(delay, k, flush) == most
    assert Method("x", delay, Keep.NOTHING, flush=flush).staleness(delay, k) == pytest.approx(sum(staleness) / len(staleness))


def random_case(seed: int) -> tuple[Method, int, int, int, int]:
    random = Random(seed)
    stages = random.randint(1, 9)
    delay = random.choice([0, 1, 2, 3, tuple(random.randint(0, 5) for _ in range(stages - 1))])
    flush = random.random() < 0.3
    made = method(delay, flush, fill=flush and random.random() < 0.5)
    return made, stages, random.randint(1, 5), random.randint(0, 40), random.randint(0, 9)


@pytest.mark.parametrize("seed", range(60))
def test_every_schedule_runs_to_the_end(seed: int) -> None:
    made, stages, k, microbatches, start = random_case(seed)
    between = made.boundary_delays(stages - 1)[: stages - 1]
    expected = orders(made, stages, k, microbatches, start)
    steps = list(timetable(expected, between))
    for j in range(stages):
        assert [(s.op, s.microbatch) for s in steps if s.stage == j] == expected[j]
    done = {}
    for step in steps:
        source = step.stage - 1 if step.op is F else step.stage + 1
        if 0 <= source < stages:
            assert done[step.op, source, step.microbatch] < step.round, "used before it can arrive"
        assert all(step.round > r for (_, j, _), r in done.items() if j == step.stage), "two steps in one round"
        done[step.op, step.stage, step.microbatch] = step.round


@pytest.mark.parametrize("seed", range(60))
def test_processes_with_blocking_messages_finish(seed: int) -> None:
    """An independent model of the edge transport: sends wait while d + 1 messages are pending, receives wait for their message."""
    made, stages, k, microbatches, start = random_case(seed)
    between = made.boundary_delays(stages - 1)[: stages - 1]
    processes = Random(seed).randint(1, stages)
    bounds = sorted(Random(seed + 1).sample(range(1, stages), processes - 1)) if stages > 1 else []
    owner = [sum(b <= j for b in bounds) for j in range(stages)]
    programs: list[deque[tuple[str, Op, int, int]]] = [deque() for _ in range(processes)]
    for step in timetable(orders(made, stages, k, microbatches, start), between):
        source = step.stage - 1 if step.op is F else step.stage + 1
        target = step.stage + 1 if step.op is F else step.stage - 1
        if 0 <= source < stages and owner[source] != owner[step.stage]:
            programs[owner[step.stage]].append(("receive", step.op, step.stage, step.microbatch))
        if 0 <= target < stages and owner[target] != owner[step.stage]:
            programs[owner[step.stage]].append(("send", step.op, target, step.microbatch))
    wires: dict[tuple[Op, int], deque[int]] = {(op, j): deque() for op, j in product(Op, range(stages))}
    progress = True
    while progress:
        progress = False
        for program in programs:
            while program:
                kind, op, j, m = program[0]
                wire = wires[op, j]
                if kind == "receive":
                    if not wire:
                        break
                    assert wire.popleft() == m
                elif len(wire) > between[j - 1 if op is F else j]:
                    break
                else:
                    wire.append(m)
                program.popleft()
                progress = True
    assert not any(programs), "the processes deadlock"


def deadlocked(*rows: str) -> Sequence[Sequence[tuple[Op, int]]]:
    return [[(Op(word[0]), int(word[1:])) for word in row.split()] for row in rows]


def test_check_finds_deadlocks() -> None:
    with pytest.raises(ScheduleError, match="stage 1 waits to run B0, stage 2 waits to run F1"):
        list(timetable(deadlocked("F0 B0 F1 B1", "F0 F1 B0 B1"), [0]))
    with pytest.raises(ScheduleError, match="deadlocks: stage 3 waits to run F1"):
        list(timetable(deadlocked("F0 B0", "F0 B0", "F0 B0 F1 B1"), [0, 0]))
    with pytest.raises(ScheduleError, match="stage 2: backward of microbatch 0 comes before its forward"):
        list(timetable(deadlocked("F0 B0", "B0 F0"), [0]))


def test_check_limits_waiting_messages() -> None:
    """A boundary of d = 1 has room for two forwards that the receiver has not used."""
    ahead = deadlocked("F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")
    list(timetable(ahead, [3]))
    list(timetable(ahead, [1]))  # the second stage uses messages while the first sends more
    with pytest.raises(ScheduleError, match="deadlocks"):
        list(timetable(deadlocked("F0 F1 F2 B0 B1 B2", "F0 B0 F2 F1 B1 B2"), [0]))


def test_evaluation_has_forwards_only() -> None:
    steps = list(timetable([evaluation_order(0, 5) for _ in range(3)], [0, 0]))
    assert len(steps) == 15
    assert all(step.op is F for step in steps)


def test_accumulation_bounds_the_updates_between_forward_and_backward() -> None:
    """Counts updates in the schedule itself: at most ⌈τ / k⌉ come between F and B of any microbatch."""
    for k, bound in ((7, 1), (4, 2)):
        made = Method("paci", 1, Keep.GRAPH, max_updates=bound)
        tau = made.delays(8, k)[0]
        crossed = [len([b for b in range(m - tau, m) if b >= 0 and (b + 1) % k == 0]) for m in range(100)]
        assert max(crossed) == bound
        with pytest.raises(ConfigError, match=f"k: expected an integer >= {k} with method.max_updates={bound}, got {k - 1}"):
            made.delays(8, k - 1)
    with pytest.raises(ConfigError, match=r"method\.max_updates: expected null or an integer >= 1, got 0"):
        Method("paci", 1, Keep.GRAPH, max_updates=0)
