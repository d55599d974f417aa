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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from petra.cost_model.costs import StageCost
from petra.cost_model.links import Connection
from petra.cost_model.period import Edges, EventGraph, Indices, Values
from petra.plan.timetable import PeriodicRounds, Round, Timetable
from petra.transport.edge import posted_receives

TransportRules = Literal["edge", "lockstep"]
"""Name of the transport whose rules messages follow."""
UNLIMITED = 2**40
"""More microbatches than any timetable runs until it repeats."""


class Steps(NamedTuple):
    """Steps of consecutive rounds, one entry per step. Each stage runs ``microbatches`` forwards and as many backwards.

    If the steps repeat, the next repetition has the same steps ``rounds`` rounds later. The microbatches of a stage's forwards are
    consecutive, and so are those of its backwards.

    Attributes:
        rounds: Number of rounds.
        microbatches: Number of microbatches.
        round, stage, forward, microbatch: Round, stage and microbatch of each step, and whether it is a forward. Sorted by round.
    """

    rounds: int
    microbatches: int
    round: Indices
    stage: Indices
    forward: NDArray[np.bool_]
    microbatch: Indices

    @staticmethod
    def of(rounds: Sequence[Round], start: int, stop: int, microbatches: int) -> Steps:
        """Return the steps of the rounds with the numbers ``start`` … ``stop`` − 1, of which the empty ones are left out."""
        numbers = np.concatenate([np.full(len(r.stages), r.round - start) for r in rounds])
        stages, forward, microbatch = (np.concatenate(parts) for parts in zip(*(r[1:] for r in rounds), strict=True))
        return Steps(stop - start, microbatches, numbers, stages, forward, microbatch)

    def repeated(self, times: int) -> Steps:
        """Return the steps of several repetitions as one."""
        index = np.repeat(np.arange(times), len(self.round))
        return Steps(
            times * self.rounds,
            times * self.microbatches,
            np.tile(self.round, times) + index * self.rounds,
            np.tile(self.stage, times),
            np.tile(self.forward, times),
            np.tile(self.microbatch, times) + index * self.microbatches,
        )


def steady_state(delays: Sequence[int], boundary_delays: Sequence[int], flush_every: int | None = None) -> Steps:
    """Return one repetition of the rounds that repeat. Arguments are those of :class:`petra.plan.timetable.Timetable`."""
    timetable = Timetable(delays, boundary_delays, 0, UNLIMITED, flush_every)
    rounds = PeriodicRounds(timetable, flush_every or 1, lambda round_: round_)
    for _ in rounds.until_steady():
        pass
    return Steps.of(rounds.body, rounds.start_of_body, timetable.now, rounds.period)


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
    def owner(self) -> Indices:
        """Process of each stage."""
        return np.repeat(np.arange(len(self.processes)), [len(stages) for stages in self.processes])


@dataclass(frozen=True)
class TimedSteps:
    """Steps with their costs, as arrays with one entry per step, in the order in which processes run them.

    Attributes:
        steps: The steps.
        process: Process of each step.
        compute: Seconds of each step until it sends.
        update: Seconds of the update that follows each step directly; 0 if none follows.
        late: Seconds of the second parts of split backwards, and of their updates. They follow the last step of the process in the
            round of each step, and its exchange if it has one.
        beside: Indices of the backwards that run beside the forward of their stage in the round before.
    """

    steps: Steps
    process: Indices
    compute: Values
    update: Values
    late: Values
    beside: Indices

    @staticmethod
    def of(steps: Steps, pipe: Pipe) -> TimedSteps:
        """Return the steps of a timetable with the costs of a pipeline."""
        stage, forward, m = steps.stage, steps.forward, steps.microbatch
        columns = ("forward", "backward", "update", "weights")
        seconds_f, seconds_b, update, weights = (np.array([getattr(cost, name) for cost in pipe.costs]) for name in columns)
        split, process = np.array(pipe.splits), pipe.owner[stage]
        weights = np.where(split, weights, 0.0)
        updates = np.where(~forward & ((m + 1) % pipe.k == 0), update[stage], 0.0)
        finished = np.where(forward, 0, _finished(m, np.array(pipe.lags)[stage], pipe.k))
        return TimedSteps(
            steps,
            process,
            compute=np.where(forward, seconds_f[stage], seconds_b[stage] - weights[stage]),
            update=np.where(split[stage], 0.0, updates),
            late=_at_end_of_round(steps, process, finished * weights[stage] + np.where(split[stage], updates, 0.0)),
            beside=_beside(steps, pipe.overlapped),
        )


@dataclass(frozen=True)
class _Messages:
    """Messages between processes, as arrays with one entry per message.

    Attributes:
        sender, receiver: Indices of the steps that send and that receive it.
        later: Number of repetitions by which its receiver is later.
        transfer, latency: Seconds on its link.
        notice: Seconds until its sender knows that its receive has been posted.
        boundary: Its boundary.
    """

    sender: Indices
    receiver: Indices
    later: Indices
    transfer: Values
    latency: Values
    notice: Values
    boundary: Indices

    @staticmethod
    def of(steps: Steps, pipe: Pipe) -> _Messages:
        stage, forward, owner, last = steps.stage, steps.forward, pipe.owner, len(pipe.costs) - 1
        bytes_f, bytes_b = (np.array([getattr(cost, name) for cost in pipe.costs]) for name in ("forward_bytes", "backward_bytes"))
        target = np.where(forward, stage + 1, stage - 1)
        remote = (target >= 0) & (target <= last) & (owner[np.clip(target, 0, last)] != owner[stage])
        sender = np.flatnonzero(remote)
        source, target, down = stage[sender], target[sender], forward[sender]
        receiver, later = _find(steps, down, target, steps.microbatch[sender])
        link = np.minimum(owner[source], owner[target])
        sides = [[pair.forward for pair in pipe.connections], [pair.backward for pair in pipe.connections]]
        bandwidth, latency = (
            [np.array([getattr(x, name) for x in side])[link] for side in sides] for name in ("bandwidth", "latency")
        )
        return _Messages(
            sender,
            receiver,
            later,
            transfer=np.where(down, bytes_f[source], bytes_b[source]) / np.where(down, *bandwidth),
            latency=np.where(down, *latency),
            notice=np.where(down, *reversed(latency)),
            boundary=np.minimum(source, target),
        )

    def other(self, steps: Steps, earlier: Indices | int) -> tuple[Indices, Indices]:
        """Return the message of the same kind ``earlier`` microbatches before each message, and how many repetitions before."""
        step, before = _find(steps, steps.forward[self.sender], steps.stage[self.sender], steps.microbatch[self.sender] - earlier)
        number = np.full(len(steps.stage), -1)
        number[self.sender] = np.arange(len(self.sender))
        return number[step], -before


@dataclass(frozen=True)
class Events:
    """Event graph of some steps, with what is needed to read it.

    Step i starts at event i and ends at event i + (number of steps). A process runs its *items* one after the other: steps, and
    exchanges in lockstep, which are numbered after the steps.

    Attributes:
        graph: The graph.
        process, round: Process and round of each item.
        before, wrapped: Item before each item in its process, and 1 if that is one repetition earlier.
        end: Event that ends each item.
        after: Seconds that the process computes after each item: updates, and second parts of split backwards.
    """

    graph: EventGraph
    process: Indices
    round: Indices
    before: Indices
    wrapped: Indices
    end: Indices
    after: Values


def event_graph(timed: TimedSteps, pipe: Pipe, *, repeats: bool) -> Events:
    """Return the event graph of steps.

    Args:
        repeats: Whether the steps are one repetition of the steady state, of a multiple of k microbatches. Otherwise they are a
            whole run, and nothing follows the last item of a process.
    """
    steps, messages = timed.steps, _Messages.of(timed.steps, pipe)
    count, sender, receiver = len(steps.stage), messages.sender, messages.receiver
    lockstep = pipe.transport == "lockstep"
    exchanges, exchange = _exchanges(timed, messages) if lockstep else (np.zeros((2, 0), np.int64), sender)
    process, round_ = (np.concatenate(parts) for parts in zip((timed.process, steps.round), exchanges, strict=True))
    before, wrapped = _previous(process, round_)
    after = _after(timed, round_, before)
    if not repeats:
        after[before[wrapped == 1]] = 0.0
    items = len(process)
    wire = np.arange(count + items, count + items + len(sender))
    start, end = np.arange(count), np.arange(count, count + items)
    alone, beside = np.setdiff1d(start, timed.beside), timed.beside
    previous, previous_before = messages.other(steps, 1)
    now, at_once = np.zeros(count, np.int64), np.zeros(len(wire))
    edges: list[Edges] = [
        (end[before[alone]], start[alone], after[before[alone]], wrapped[alone]),
        (start, end[:count], timed.compute, now),
        (end[before[beside]], end[beside], after[before[beside]], wrapped[beside]),
        (end[before[count:]], end[count:], after[before[count:]], wrapped[count:]),
        (wire, start[receiver], messages.latency, messages.later),
        (wire[previous], wire, messages.transfer, previous_before),
        *_starts_beside(timed, process, round_, before, wrapped, end, after),
    ]
    if lockstep:
        at, wraps = before[count + exchange], wrapped[count + exchange]  # items after which sender and receiver post the message
        following, following_wraps = _following(exchanges[0])
        edges += [
            (wire, end[count + following[exchange[0]]], at_once, following_wraps[exchange[0]]),
            (end[at[0]], wire, after[at[0]] + messages.transfer, wraps[0]),
            (end[at[1]], wire, after[at[1]] + messages.notice + messages.transfer, wraps[1]),
        ]
    else:
        delays = np.array(pipe.boundary_delays, np.int64)[messages.boundary]
        oldest, oldest_before = messages.other(steps, delays + 1)
        ahead = np.array([posted_receives(delay) for delay in delays.tolist()], np.int64)
        posted, posted_before = messages.other(steps, ahead)
        edges += [
            (wire[oldest], end[sender], at_once, oldest_before),
            (end[sender], wire, messages.transfer, now[sender]),
            (start[receiver[posted]], wire, messages.notice + messages.transfer, posted_before - messages.later[posted]),
        ]
    phase = np.concatenate([4 * steps.round, 4 * steps.round + 1, 4 * exchanges[1] + 2, 4 * steps.round[sender] + 3])
    return Events(EventGraph.of(phase, edges), process, round_, before, wrapped, end, after)


def _exchanges(timed: TimedSteps, messages: _Messages) -> tuple[Indices, Indices]:
    """Return process and round of each exchange, sorted by round, and the exchanges of sender and receiver of each message.

    A process takes part in the exchange of a round in which it sends or a neighbour sends to it.
    """
    processes = int(timed.process.max()) + 1
    taking_part = timed.process[np.stack([messages.sender, messages.receiver])]
    key, exchange = np.unique(timed.steps.round[messages.sender] * processes + taking_part, return_inverse=True)
    round_, process = np.divmod(key, processes)
    return np.stack([process, round_]), exchange.reshape(taking_part.shape)


def _after(timed: TimedSteps, round_: Indices, before: Indices) -> Values:
    """Return the seconds that the process computes after each item: second parts come after the exchange of their round."""
    count = len(timed.late)
    late = np.concatenate([timed.late, np.zeros(len(round_) - count)])
    own = count + np.flatnonzero((before[count:] < count) & (round_[before[count:]] == round_[count:]))
    late[own], late[before[own]] = late[before[own]], 0.0
    late[:count] += timed.update
    return late


def _starts_beside(
    timed: TimedSteps, process: Indices, round_: Indices, before: Indices, wrapped: Indices, end: Indices, after: Values
) -> list[Edges]:
    """Return the edges to the starts of backwards beside forwards: to the start of the forward's round, and in their own thread."""
    beside, first = timed.beside, dict[tuple[int, int], int]()
    for item in np.argsort(round_, kind="stable").tolist():
        first.setdefault((int(process[item]), int(round_[item])), item)
    forward_round = round_[beside] - 1
    places = zip(process[beside].tolist(), (forward_round % timed.steps.rounds).tolist(), strict=True)
    heads = np.array([first[place] for place in places], np.int64)
    previous, passed = _previous(process[beside], round_[beside])
    return [
        (end[before[heads]], beside, after[before[heads]], wrapped[heads] + (forward_round < 0)),
        (beside[previous], beside, timed.compute[beside[previous]], passed),
    ]


def _beside(steps: Steps, overlapped: Sequence[int]) -> Indices:
    """Return the indices of the backwards of ``overlapped`` stages whose stage runs a forward in the round before."""
    forwards = set(zip(steps.stage[steps.forward].tolist(), steps.round[steps.forward].tolist(), strict=True))
    columns = zip(steps.stage.tolist(), steps.round.tolist(), steps.forward.tolist(), strict=True)
    chosen = set(overlapped)
    return np.array(
        [
            i
            for i, (stage, round_, forward) in enumerate(columns)
            if not forward and stage in chosen and (stage, (round_ - 1) % steps.rounds) in forwards
        ],
        np.int64,
    )


def _finished(microbatch: Indices, lag: Indices, k: int) -> Indices:
    """Return how many split backwards get their second part after the first part of each microbatch: all left before an update."""
    place = microbatch % k
    return np.where(place == k - 1, 1 + np.minimum(lag, k - 1), place >= lag)


def _at_end_of_round(steps: Steps, process: Indices, seconds: Values) -> Values:
    """Move the seconds of each step to the last step of its process in the same round."""
    _, step = np.unique(steps.round * (int(process.max()) + 1) + process, return_inverse=True)
    last = np.zeros(int(step.max()) + 1, np.int64)
    np.maximum.at(last, step, np.arange(len(step)))
    moved = np.zeros(len(step))
    np.add.at(moved, last[step], seconds)
    return moved


def _find(steps: Steps, forward: NDArray[np.bool_], stage: Indices, microbatch: Indices) -> tuple[Indices, Indices]:
    """Return the index of each step, and how many repetitions later than this one it is."""
    period, stages = steps.microbatches, int(steps.stage.max()) + 1
    index, first = np.empty((2, stages, period), np.int64), np.full((2, stages), np.iinfo(np.int64).max)
    np.minimum.at(first, (steps.forward.astype(int), steps.stage), steps.microbatch)
    slot = steps.microbatch - first[steps.forward.astype(int), steps.stage]
    index[steps.forward.astype(int), steps.stage, slot] = np.arange(len(slot))
    later, slot = np.divmod(microbatch - first[forward.astype(int), stage], period)
    return index[forward.astype(int), stage, slot], later


def _previous(process: Indices, round_: Indices) -> tuple[Indices, Indices]:
    """Return the item before each item in its process, in the order of rounds, and 1 if that is one repetition earlier."""
    order = np.lexsort((np.arange(len(process)), round_, process))
    grouped, place = process[order], np.arange(len(order))
    start, stop = np.searchsorted(grouped, grouped), np.searchsorted(grouped, grouped, "right")
    before, wrapped = np.empty_like(order), np.empty_like(order)
    before[order] = order[np.where(place > start, place - 1, stop - 1)]
    wrapped[order] = place == start
    return before, wrapped


def _following(process: Indices) -> tuple[Indices, Indices]:
    """Return the exchange after each exchange in its process, and 1 if that is one repetition later."""
    before, wrapped = _previous(process, np.arange(len(process)))
    following, wraps = np.empty_like(before), np.empty_like(before)
    following[before], wraps[before] = np.arange(len(process)), wrapped
    return following, wraps
