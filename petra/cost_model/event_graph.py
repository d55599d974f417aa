"""The event graph of a timetable: what each step and each message waits for, by the rules of the transports.

Events: the start of each step, its end after sending, and the end of the transfer of its message to another process; in lockstep,
also the start and the end of each exchange of a process.

In both transports, a transfer starts when the sender knows that its receive has been posted, as in gloo and NCCL: this notice takes
the latency of the other direction. Transfers of one direction of a boundary follow one another.

- edge: receives are posted in advance. A sender with d + 1 pending messages waits until the oldest has left.
- lockstep: after each round, the two ends of a boundary post their messages together. Each sender then waits until what it sent in
  its exchange before has left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

from petra.cost_model.costs import StageCost
from petra.cost_model.machines import Connection, Link
from petra.cost_model.period import Edge, EventGraph
from petra.diagnostics.events import Kind
from petra.method import METHODS, Keep, Method
from petra.plan.timetable import Op, PeriodicRounds, Step, Timetable
from petra.transport.edge import posted_receives

TransportRules = Literal["edge", "lockstep"]
"""Name of the transport whose rules messages follow."""
UNLIMITED = 2**40
"""More microbatches than any timetable runs until it repeats."""
LAST = 2**40
"""Position of exchanges in a round: after all steps."""
START, END, ARRIVAL = range(3)
"""Events of an item: item number i has the events 3 · i + START, + END, and + ARRIVAL of its message."""


@dataclass(frozen=True)
class ZeroBubble(Method):
    """ZB-H1 (Qi et al. 2024, Zero Bubble Pipeline Parallelism), a rival for predictions and simulations, not for training.

    It is 1F1B with a backward in two parts. The first computes δ and sends it. The second computes the gradients of the parameters;
    stage j postpones it by τ_1 − τ_j microbatches, but not beyond the update, and so fills the time in which it would wait. It
    requires ``flush`` and excludes ``fill``.
    """


ZB_H1 = ZeroBubble("zb_h1", delay=1, keep=Keep.GRAPH, flush=True)
PREDICTED: dict[str, Method] = {**METHODS, ZB_H1.name: ZB_H1}
"""Methods that can be predicted and simulated, by name."""


@dataclass(frozen=True)
class Pipe:
    """A pipeline to be predicted.

    Attributes:
        costs: Cost of each stage.
        k: Microbatches per update.
        processes: Stages of each process.
        connections: Connection of each process to the next one.
        transport: Transport whose rules the messages follow.
    """

    costs: Sequence[StageCost]
    method: Method
    k: int
    processes: Sequence[range]
    connections: Sequence[Connection]
    transport: TransportRules

    @cached_property
    def delays(self) -> Sequence[int]:
        """Delay τ of each stage."""
        return self.method.delays(len(self.costs), self.k)

    @cached_property
    def boundary_delays(self) -> Sequence[int]:
        """Delay d of each boundary."""
        return self.method.boundary_delays(len(self.costs) - 1)

    @cached_property
    def owner(self) -> Sequence[int]:
        """Process of each stage."""
        return [p for p, stages in enumerate(self.processes) for _ in stages]

    def timetable(self, microbatches: int = UNLIMITED) -> Timetable:
        """Return the timetable of a run."""
        return Timetable(self.delays, self.boundary_delays, 0, microbatches, self.k if self.method.flush else None)

    def receiver(self, step: Step) -> int | None:
        """Return the stage in another process to which a step sends a message; None if there is none."""
        target = step.stage + (1 if step.op is Op.FORWARD else -1)
        return target if 0 <= target < len(self.costs) and self.owner[target] != self.owner[step.stage] else None

    def message(self, step: Step) -> tuple[Link, Link, float]:
        """Return the link of a step's message, the link back, and the seconds that the message takes on its link."""
        forward, cost = step.op is Op.FORWARD, self.costs[step.stage]
        pair = self.connections[self.owner[step.stage] - (not forward)]
        link, back = (pair.forward, pair.backward) if forward else (pair.backward, pair.forward)
        return link, back, (cost.forward_bytes if forward else cost.backward_bytes) / link.bandwidth

    def steady_state(self) -> tuple[list[Step], int]:
        """Return the steps that repeat, and their number of microbatches: a multiple of k if updates take time."""
        period = self.k if self.method.flush else 1
        rounds = PeriodicRounds(self.timetable(), period, lambda round_: round_)
        for _ in rounds.until_steady():
            pass
        times = max(1, self.k // period) if any(cost.update for cost in self.costs) else 1
        steps = [
            Step(number + i * rounds.length, stage, op, m + i * period)
            for i in range(times)
            for body in rounds.period_rounds
            for number, stage, op, m in body.steps()
        ]
        return steps, times * period


class Work(NamedTuple):
    """Work that follows a step in its process: an update, or the second part of a split backward."""

    stage: int
    kind: Kind
    microbatch: int
    seconds: float


@dataclass
class Item:
    """What a process does in order: a step, or an exchange in lockstep.

    Attributes:
        process, round, position: Its process, round, and position in the round.
        step: The step; None for an exchange.
        compute: Seconds of the step until it sends.
        after: Work that follows.
    """

    process: int
    round: int
    position: int
    step: Step | None = None
    compute: float = 0.0
    after: list[Work] = field(default_factory=list)


class Events:
    """Event graph of some steps, with what is needed to read it.

    Args:
        steps: Steps of consecutive rounds, in order.
        microbatches: If the steps repeat, the number of microbatches after which they do. None if they are a whole run.

    Attributes:
        items: Steps and exchanges, in order.
        graph: The graph.
    """

    def __init__(self, steps: Sequence[Step], pipe: Pipe, microbatches: int | None = None) -> None:
        self._pipe, self._period, self._repeats = pipe, microbatches or UNLIMITED, microbatches is not None
        self._edges: list[Edge] = []
        self.items = [item for _, group in groupby(steps, lambda step: step.round) for item in self._items([*group])]
        self._passes = {
            (step.op, step.stage, step.microbatch % self._period): i
            for i, item in enumerate(self.items)
            if (step := item.step) is not None
        }
        own, exchanges = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for i, item in enumerate(self.items):
            own[item.process].append(i)
            if item.step is None:
                exchanges[item.process].append(i)
        for items in own.values():
            for before, i in zip([items[-1], *items], items, strict=False):
                late = sum(work.seconds for work in self.items[before].after)
                self._wait(3 * i + START, before, END, late, int(before >= i))
                self._wait(3 * i + END, i, START, self.items[i].compute)
        for i, item in enumerate(self.items):
            if item.step is not None and (target := pipe.receiver(item.step)) is not None:
                self._send(i, item.step, target)
        lockstep = pipe.transport == "lockstep"
        if lockstep:
            self._exchange(exchanges)
        phases = [
            (item.round, LAST if event == ARRIVAL and lockstep else item.position, event)
            for item in self.items
            for event in (START, END, ARRIVAL)
        ]
        self.graph = EventGraph.of(phases, self._edges)

    def _items(self, steps: Sequence[Step]) -> list[Item]:
        """Return the items of one round: what each process does, with second parts of backwards at the end."""
        pipe, found, exchanging = self._pipe, defaultdict[int, list[Item]](list), set[int]()
        late = defaultdict[int, list[Work]](list)
        for step in steps:
            cost, process = pipe.costs[step.stage], pipe.owner[step.stage]
            item = Item(process, step.round, len(found[process]), step, cost.forward)
            found[process].append(item)
            if step.op is Op.BACKWARD:
                split = step.stage > 0 and isinstance(pipe.method, ZeroBubble)  # the first stage sends nothing
                item.compute = cost.backward - (cost.weights if split else 0.0)
                (late[process] if split else item.after).extend(_work_after(pipe, step.stage, step.microbatch, split=split))
            if (target := pipe.receiver(step)) is not None:
                exchanging |= {process, pipe.owner[target]}
        if pipe.transport == "lockstep":
            for process in sorted(exchanging):
                found[process].append(Item(process, steps[0].round, LAST))
        for process, work in late.items():
            found[process][-1].after += work
        return sorted((item for items in found.values() for item in items), key=lambda item: item.step is None)

    def _wait(self, event: int, source: int | None, place: int, seconds: float, repetitions: int = 0) -> None:
        """Let an event wait for one of an item; in a whole run, for the begin if that one does not exist."""
        if source is None or (repetitions > 0 and not self._repeats):
            self._edges.append((event, event, seconds if source is None else 0.0, 1))
        else:
            self._edges.append((event, 3 * source + place, seconds, repetitions))

    def _pass(self, op: Op, stage: int, m: int) -> tuple[int | None, int]:
        """Return the item that runs microbatch ``m`` on a stage, and how many repetitions earlier it does so."""
        found = self._passes.get((op, stage, m % self._period))
        step = None if found is None else self.items[found].step
        return found, 0 if step is None else (step.microbatch - m) // self._period

    def _send(self, i: int, step: Step, target: int) -> None:
        """Let a message wait for the one before it, and its receiver for the message; in edge, also for its receive."""
        _, stage, op, m = step
        link, back, seconds = self._pipe.message(step)
        received, repetitions = self._pass(op, target, m)
        assert received is not None
        self._wait(3 * received + START, i, ARRIVAL, link.latency, -repetitions)
        before, repetitions = self._pass(op, stage, m - 1)
        self._wait(3 * i + ARRIVAL, before, ARRIVAL, seconds, repetitions)
        if self._pipe.transport == "edge":
            d = self._pipe.boundary_delays[min(stage, target)]
            oldest, repetitions = self._pass(op, stage, m - d - 1)
            self._wait(3 * i + END, oldest, ARRIVAL, 0.0, repetitions)
            self._wait(3 * i + ARRIVAL, i, END, seconds)
            posted, repetitions = self._pass(op, target, m - posted_receives(d))
            self._wait(3 * i + ARRIVAL, posted, START, back.latency + seconds, repetitions)

    def _exchange(self, exchanges: dict[int, list[int]]) -> None:
        """Let messages wait until both ends have come to the exchange, and the next exchange of the sender for the messages."""
        places = {(process, self.items[i].round): n for process, items in exchanges.items() for n, i in enumerate(items)}
        for i, item in enumerate(self.items):
            if item.step is None or (target := self._pipe.receiver(item.step)) is None:
                continue
            _, back, seconds = self._pipe.message(item.step)
            for process, notice in ((item.process, 0.0), (self._pipe.owner[target], back.latency)):
                own = exchanges[process][places[process, item.round]]
                self._wait(3 * i + ARRIVAL, own, START, notice + seconds)
            sent, own_exchanges = places[item.process, item.round], exchanges[item.process]
            following = own_exchanges[(sent + 1) % len(own_exchanges)]
            self._wait(3 * following + END, i, ARRIVAL, 0.0, int(sent + 1 == len(own_exchanges)))


def _work_after(pipe: Pipe, stage: int, m: int, *, split: bool) -> Iterator[Work]:
    """Yield what follows the backward of microbatch ``m``: an update, and the second parts of split backwards (ZB-H1).

    Second parts compute the gradients of the parameters. Stage j postpones them by τ_1 − τ_j microbatches. None is left before an
    update.
    """
    cost, place = pipe.costs[stage], m % pipe.k
    updates = place == pipe.k - 1
    if split:
        lag = pipe.delays[0] - pipe.delays[stage]
        first = m - min(lag, place)
        for found in range(first, m + 1 if updates else first + (place >= lag)):
            yield Work(stage, Kind.BACKWARD_WEIGHTS, found, cost.weights)
    if updates:
        yield Work(stage, Kind.UPDATE, m, cost.update)
