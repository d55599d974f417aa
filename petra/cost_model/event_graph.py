"""The event graph of a timetable: what each step and each message waits for, by the rules of the transports.

Events: the start of each step, its end after sending, and the end of each transfer of a message between processes; in lockstep,
also the end of each exchange of a process.

In both transports, a transfer starts when the sender knows that its receive has been posted, as in gloo and NCCL: this notice takes
the latency of the other direction. Transfers of one direction of a boundary follow one another.

- edge: receives are posted in advance. A sender with d + 1 pending messages waits until the oldest has left.
- lockstep: after each round, the two ends of a boundary post their messages together. Each sender then waits until what it sent in
  its exchange before has left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

from petra.cost_model.costs import StageCost
from petra.cost_model.links import Connection, Link
from petra.cost_model.period import Edge, EventGraph
from petra.diagnostics.events import Kind
from petra.plan.timetable import Op, PeriodicRounds, Step, Timetable
from petra.transport.edge import posted_receives

TransportRules = Literal["edge", "lockstep"]
"""Name of the transport whose rules messages follow."""
UNLIMITED = 2**40
"""More microbatches than any timetable runs until it repeats."""
LAST = 2**40
"""Position of exchanges in a round: after all steps."""
Pass = tuple[Op, int, int]
"""Forward or backward, stage and microbatch."""


class Steps(NamedTuple):
    """Steps of consecutive rounds, in order.

    Attributes:
        steps: The steps, with the numbers of their rounds.
        rounds, microbatches: If the steps repeat, the next repetition comes these numbers of rounds and of microbatches later. None
            if they are a whole run.
    """

    steps: Sequence[Step]
    rounds: int | None = None
    microbatches: int | None = None


def steady_state(delays: Sequence[int], boundary_delays: Sequence[int], flush_every: int | None, multiple: int = 1) -> Steps:
    """Return the rounds that repeat, so often that a multiple of some number of microbatches runs.

    Other arguments are those of :class:`petra.plan.timetable.Timetable`.
    """
    rounds = PeriodicRounds(Timetable(delays, boundary_delays, 0, UNLIMITED, flush_every), flush_every or 1, lambda r: r)
    for _ in rounds.until_steady():
        pass
    times = max(1, multiple // rounds.period)
    steps = [
        Step(number + i * rounds.length, stage, op, m + i * rounds.period)
        for i in range(times)
        for body in rounds.body
        for number, stage, op, m in body.steps()
    ]
    return Steps(steps, times * rounds.length, times * rounds.period)


@dataclass(frozen=True)
class Pipe:
    """A pipeline to be predicted.

    Attributes:
        costs: Cost of each stage.
        k: Microbatches per update.
        processes: Stages of each process.
        connections: Connection of each process to the next one.
        boundary_delays: Delay d of each boundary.
        transport: Transport whose rules the messages follow.
        splits, lags: Whether each stage splits its backward (ZB-H1), and by how many microbatches it postpones the second part.
        overlapped: Stages that run forward beside backward; none if stages split their backward.
    """

    costs: Sequence[StageCost]
    k: int
    processes: Sequence[range]
    connections: Sequence[Connection]
    boundary_delays: Sequence[int]
    transport: TransportRules
    splits: Sequence[bool]
    lags: Sequence[int]
    overlapped: Sequence[int] = ()

    @cached_property
    def owner(self) -> Sequence[int]:
        """Process of each stage."""
        return [p for p, stages in enumerate(self.processes) for _ in stages]

    def receiver(self, op: Op, stage: int) -> int | None:
        """Return the stage that receives a message from another process; None if the stage sends none."""
        target = stage + 1 if op is Op.FORWARD else stage - 1
        return target if 0 <= target < len(self.costs) and self.owner[target] != self.owner[stage] else None

    def links(self, op: Op, stage: int) -> tuple[Link, Link]:
        """Return the link of a stage's message and the link back."""
        pair = self.connections[self.owner[stage] - (op is Op.BACKWARD)]
        return (pair.forward, pair.backward) if op is Op.FORWARD else (pair.backward, pair.forward)

    def transfer(self, op: Op, stage: int) -> float:
        """Return the seconds that a stage's message takes on its link."""
        cost = self.costs[stage]
        return (cost.forward_bytes if op is Op.FORWARD else cost.backward_bytes) / self.links(op, stage)[0].bandwidth


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
        start, end: Its events; an exchange has only an end.
        beside: Whether it is a backward that runs beside the forward of its stage in the round before.
    """

    process: int
    round: int
    position: int
    step: Step | None = None
    compute: float = 0.0
    after: list[Work] = field(default_factory=list)
    start: int = -1
    end: int = -1
    beside: bool = False


class Events:
    """Event graph of some steps, with what is needed to read it.

    Attributes:
        items: Steps and exchanges, in order.
        graph: The graph.
    """

    def __init__(self, steps: Steps, pipe: Pipe) -> None:
        self._pipe, self._repeats, self._rounds = pipe, steps.microbatches is not None, steps.rounds or 0
        self._period = steps.microbatches or UNLIMITED
        self._phases: list[tuple[int, int, int]] = []
        self._edges: list[Edge] = []
        self.items = [item for _, group in groupby(steps.steps, lambda step: step.round) for item in self._items([*group])]
        own: dict[int, list[Item]] = {}
        for item in self.items:
            own.setdefault(item.process, []).append(item)
        self._before = {id(item): (items[i - 1], int(i == 0)) for items in own.values() for i, item in enumerate(items)}
        self._passes = {self._key(step): item for item in self.items if (step := item.step) is not None}
        self._wires = {key: self._event(item, 2) for key, item in self._passes.items() if pipe.receiver(*key[:2]) is not None}
        self._mark_beside(own)
        for item in self.items:
            self._follow(item)
        for key in self._wires:
            self._transfer(key)
        if pipe.transport == "lockstep":
            self._exchange([[item for item in items if item.step is None] for items in own.values()])
        self.graph = EventGraph.of(self._phases, self._edges)

    def _items(self, steps: Sequence[Step]) -> list[Item]:
        """Return the items of one round: what each process does, with second parts of backwards at the end."""
        pipe, found, exchanging = self._pipe, defaultdict[int, list[Item]](list), set[int]()
        late = defaultdict[int, list[Work]](list)
        for step in steps:
            cost, process, split = pipe.costs[step.stage], pipe.owner[step.stage], pipe.splits[step.stage]
            item = Item(process, step.round, len(found[process]), step)
            found[process].append(item)
            if step.op is Op.FORWARD:
                item.compute = cost.forward
            else:
                item.compute = cost.backward - (cost.weights if split else 0.0)
                (late[process] if split else item.after).extend(_work_after(pipe, step.stage, step.microbatch))
            if (target := pipe.receiver(step.op, step.stage)) is not None:
                exchanging |= {process, pipe.owner[target]}
        if pipe.transport == "lockstep":
            for process in sorted(exchanging):
                found[process].append(Item(process, steps[0].round, LAST))
        for process, work in late.items():
            found[process][-1].after += work
        items = sorted((item for items in found.values() for item in items), key=lambda item: item.step is None)
        for item in items:
            item.start, item.end = (-1 if item.step is None else self._event(item, 0)), self._event(item, 1)
        return items

    def _event(self, item: Item, place: int) -> int:
        """Add an event, given its place in an item: start, end, or end of the transfer."""
        position = LAST if place == 2 and self._pipe.transport == "lockstep" else item.position
        self._phases.append((item.round, position, place))
        return len(self._phases) - 1

    def _key(self, step: Step) -> Pass:
        return step.op, step.stage, step.microbatch % self._period

    def _earlier(self, key: Pass, microbatches: int) -> tuple[Pass, int]:
        """Return the pass of the same stage some microbatches earlier, and how many repetitions it is earlier."""
        op, stage, _ = key
        m = self._microbatch(key) - microbatches
        found = op, stage, m % self._period
        return found, (self._microbatch(found) - m) // self._period if found in self._passes else 0

    def _microbatch(self, key: Pass) -> int:
        step = self._passes[key].step
        assert step is not None
        return step.microbatch

    def _edge(self, target: int, source: int | None, seconds: float, repetitions: int = 0) -> None:
        """Let an event wait for another one; in a whole run, for the begin if that one does not exist."""
        begin = source is None or (repetitions > 0 and not self._repeats)
        self._edges.append((target, target, seconds, 1) if begin or source is None else (target, source, seconds, repetitions))

    def _after_item(self, item: Item) -> tuple[int, float, int]:
        """Return the end of the item before, the seconds of what follows it, and how many repetitions it is earlier."""
        before, wraps = self._before[id(item)]
        return before.end, 0.0 if wraps and not self._repeats else sum(work.seconds for work in before.after), wraps

    def _follow(self, item: Item) -> None:
        """Let an item wait for the one before it in its process."""
        self._edge(item.end if item.step is None or item.beside else item.start, *self._after_item(item))
        if item.step is not None:
            self._edge(item.end, item.start, item.compute)

    def _transfer(self, key: Pass) -> None:
        """Let a message wait for the one before it, and its receiver for the message; in edge, also for its receive."""
        op, stage, m = key
        pipe, item, wire, target = self._pipe, self._passes[key], self._wires[key], self._pipe.receiver(op, stage)
        assert target is not None
        (link, back), seconds, d = pipe.links(op, stage), pipe.transfer(op, stage), pipe.boundary_delays[min(stage, target)]
        received = op, target, m
        later = (self._microbatch(key) - self._microbatch(received)) // self._period
        self._edge(self._passes[received].start, wire, link.latency, later)
        previous, repetitions = self._earlier(key, 1)
        self._edge(wire, self._wires.get(previous), seconds, repetitions)
        if pipe.transport == "edge":
            oldest, repetitions = self._earlier(key, d + 1)
            self._edge(item.end, self._wires.get(oldest), 0.0, repetitions)
            self._edge(wire, item.end, seconds)
            posted, repetitions = self._earlier(received, posted_receives(d))
            begin = self._passes[posted].start if posted in self._passes else None
            self._edge(wire, begin, back.latency + seconds, repetitions - later)

    def _exchange(self, exchanges: Sequence[Sequence[Item]]) -> None:
        """Let messages wait until both ends have come to the exchange, and the next exchange of the sender for the messages."""
        places = {(item.process, item.round): item for items in exchanges for item in items}
        following = {id(items[i - 1]): (item, int(i == 0)) for items in exchanges for i, item in enumerate(items)}
        for key, wire in self._wires.items():
            op, stage, _ = key
            target, seconds, number = self._pipe.receiver(op, stage), self._pipe.transfer(op, stage), self._passes[key].round
            assert target is not None
            sender, receiver = (places[self._pipe.owner[j], number] for j in (stage, target))
            for item, more in ((sender, 0.0), (receiver, self._pipe.links(op, stage)[1].latency)):
                before, after, wraps = self._after_item(item)
                self._edge(wire, before, after + more + seconds, wraps)
            then, wraps = following[id(sender)]
            self._edge(then.end, wire, 0.0, wraps)

    def _mark_beside(self, own: Mapping[int, Sequence[Item]]) -> None:
        """Let backwards beside forwards start with the round of the forward, and one after the other in their own thread."""
        forwards = {(item.step.stage, item.round) for item in self.items if item.step is not None and item.step.op is Op.FORWARD}
        for items in own.values():
            first = {item.round: item for item in reversed(items)}
            beside = list[Item]()
            for item in items:
                step = item.step
                if step is None or step.op is Op.FORWARD or step.stage not in self._pipe.overlapped:
                    continue
                wraps = (step.stage, item.round - 1) not in forwards
                number = item.round - 1 + wraps * self._rounds
                if (step.stage, number) in forwards:
                    item.beside = True
                    end, seconds, repetitions = self._after_item(first[number])
                    self._edge(item.start, end, seconds, repetitions + wraps)
                    beside.append(item)
            for i, item in enumerate(beside):
                self._edge(item.start, beside[i - 1].start, beside[i - 1].compute, int(i == 0))


def _work_after(pipe: Pipe, stage: int, m: int) -> Iterator[Work]:
    """Yield what follows the backward of microbatch ``m``: an update, and the second parts of split backwards (ZB-H1).

    Second parts compute the gradients of the parameters. None is left before an update.
    """
    cost, place = pipe.costs[stage], m % pipe.k
    updates = place == pipe.k - 1
    if pipe.splits[stage]:
        lag = pipe.lags[stage]
        first = m - min(lag, place)
        for found in range(first, m + 1 if updates else first + (place >= lag)):
            yield Work(stage, Kind.BACKWARD_WEIGHTS, found, cost.weights)
    if updates:
        yield Work(stage, Kind.UPDATE, m, cost.update)
