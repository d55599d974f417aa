"""The event graph of a pipeline's steady state: what each step and each transfer waits for, by the rules of the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from petra.cost_model.costs import StageCost
from petra.cost_model.links import Connection
from petra.cost_model.period import Edges, EventGraph, Indices, Values
from petra.cost_model.steps import Steps
from petra.cost_model.wires import WireModel
from petra.transport.edge import posted_receives


def event_graph(
    steady: Steps,
    costs: Sequence[StageCost],
    k: int,
    processes: Sequence[range],
    connections: Sequence[Connection],
    boundary_delays: Sequence[int],
    transport: WireModel,
    splits: Sequence[bool],
    lags: Sequence[int],
    overlapped: Sequence[int] = (),
) -> EventGraph:
    """Return the event graph of one repetition of ``steady``, whose number of microbatches must be a multiple of k.

    Args:
        costs: Cost of each stage.
        k: Microbatches per update.
        processes: Stages of each process.
        connections: Connection of each process to the next one.
        boundary_delays: Delay d of each boundary.
        transport: Transport whose rules the messages follow.
        splits, lags: Whether each stage splits its backward, and by how many microbatches it postpones the second part.
        overlapped: Stages that run forward beside backward; none if stages split their backward (ZB-H1).
    """
    steps = _Steps.of(steady, costs, k, processes, connections, splits, lags, overlapped)
    return _edge_graph(steps, np.array(boundary_delays, np.int64)) if transport == "edge" else _lockstep_graph(steps)


@dataclass(frozen=True)
class _Steps:
    """The steps of one repetition as arrays with one entry per step, in the order in which processes run them.

    Attributes:
        steady: The steps.
        process: Process of each step.
        compute: Seconds of each step until it sends.
        update: Seconds of the update that follows each step directly; 0 if none follows.
        late: Seconds of the second parts of split backwards, and of their updates. They follow the last step of the process in the
            round of each step, and its exchange if it has one.
        sender, receiver: Indices of the steps that send and that receive a message between two processes.
        later: For each message, number of repetitions by which its receiver is later.
        transfer, latency: Seconds of each message on its link.
        notice: Seconds until the sender of each message knows that its receive has been posted.
        boundary: Boundary of each message.
        beside: Indices of the backwards that run beside the forward of their stage in the round before.
    """

    steady: Steps
    process: Indices
    compute: Values
    update: Values
    late: Values
    sender: Indices
    receiver: Indices
    later: Indices
    transfer: Values
    latency: Values
    notice: Values
    boundary: Indices
    beside: Indices

    @staticmethod
    def of(
        steady: Steps,
        costs: Sequence[StageCost],
        k: int,
        processes: Sequence[range],
        connections: Sequence[Connection],
        splits: Sequence[bool],
        lags: Sequence[int],
        overlapped: Sequence[int],
    ) -> _Steps:
        stage, forward, m = steady.stage, steady.forward, steady.microbatch
        owner = np.repeat(np.arange(len(processes)), [len(stages) for stages in processes])
        columns = ("forward", "backward", "update", "weights", "forward_bytes", "backward_bytes")
        seconds_f, seconds_b, update, weights, bytes_f, bytes_b = (
            np.array([getattr(cost, name) for cost in costs]) for name in columns
        )
        split = np.array(splits)
        weights = np.where(split, weights, 0.0)
        updates = np.where(~forward & ((m + 1) % k == 0), update[stage], 0.0)
        finished = np.where(forward, 0, _finished(m, np.array(lags)[stage], k))
        target = np.where(forward, stage + 1, stage - 1)
        exists = (target >= 0) & (target < len(costs))
        sender = np.flatnonzero(exists & (owner[np.clip(target, 0, len(costs) - 1)] != owner[stage]))
        receiver, later = _find(steady, forward[sender], target[sender], m[sender])
        down, link = forward[sender], np.minimum(owner[stage[sender]], owner[target[sender]])
        bandwidth, latency = (
            [np.array([getattr(side, name) for side in sides])[link] for sides in _sides(connections)]
            for name in ("bandwidth", "latency")
        )
        return _Steps(
            steady,
            process=owner[stage],
            compute=np.where(forward, seconds_f[stage], seconds_b[stage] - weights[stage]),
            update=np.where(split[stage], 0.0, updates),
            late=_at_end_of_round(steady, owner[stage], finished * weights[stage] + np.where(split[stage], updates, 0.0)),
            sender=sender,
            receiver=receiver,
            later=later,
            transfer=np.where(down, bytes_f[stage[sender]], bytes_b[stage[sender]]) / np.where(down, *bandwidth),
            latency=np.where(down, *latency),
            notice=np.where(down, *reversed(latency)),
            boundary=np.minimum(stage[sender], target[sender]),
            beside=_beside(steady, overlapped),
        )

    def other_message(self, earlier: Indices | int) -> tuple[Indices, Indices]:
        """Return the message of the same kind ``earlier`` microbatches before each message, and how many repetitions before."""
        stage, forward, m = self.steady.stage[self.sender], self.steady.forward[self.sender], self.steady.microbatch[self.sender]
        step, before = _find(self.steady, forward, stage, m - earlier)
        number = np.full(len(self.process), -1)
        number[self.sender] = np.arange(len(self.sender))
        return number[step], -before


def _beside(steady: Steps, overlapped: Sequence[int]) -> Indices:
    """Return the indices of the backwards of ``overlapped`` stages whose stage runs a forward in the round before."""
    forwards = set(zip(steady.stage[steady.forward].tolist(), steady.round[steady.forward].tolist(), strict=True))
    columns = zip(steady.stage.tolist(), steady.round.tolist(), steady.forward.tolist(), strict=True)
    chosen = set(overlapped)
    return np.array(
        [
            i
            for i, (stage, round_, forward) in enumerate(columns)
            if not forward and stage in chosen and (stage, (round_ - 1) % steady.rounds) in forwards
        ],
        np.int64,
    )


@dataclass(frozen=True)
class _Beside:
    """What backwards beside forwards wait for, as arrays with one entry for each of them.

    Attributes:
        step: Index of the step.
        start, started: Event that ends the rounds before the forward's in the process, and by how many repetitions it is earlier.
        previous, passed: Number of the backward that ran before in the same thread, and by how many repetitions it is earlier.
    """

    step: Indices
    start: Indices
    started: Indices
    previous: Indices
    passed: Indices

    @staticmethod
    def of(steps: _Steps, process: Indices, round_: Indices, order: Indices, before: Indices, wrapped: Indices) -> _Beside:
        """Return them, given process, round and predecessor of each event, and the order of events; steps come first."""
        first: dict[tuple[int, int], int] = {}
        for event in order.tolist():
            first.setdefault((int(process[event]), int(round_[event])), event)
        chosen = steps.beside
        forward_round = round_[chosen] - 1
        rounds, own = steps.steady.rounds, process[chosen]
        heads = np.array([first[p, r % rounds] for p, r in zip(own.tolist(), forward_round.tolist(), strict=True)], np.int64)
        previous, passed = _previous(own)
        return _Beside(chosen, before[heads], wrapped[heads] + (forward_round < 0), previous, passed)


def _finished(microbatch: Indices, lag: Indices, k: int) -> Indices:
    """Return how many split backwards get their second part after the first part of each microbatch: all left before an update."""
    place = microbatch % k
    return np.where(place == k - 1, 1 + np.minimum(lag, k - 1), place >= lag)


def _at_end_of_round(steady: Steps, process: Indices, seconds: Values) -> Values:
    """Move the seconds of each step to the last step of its process in the same round."""
    _, step = np.unique(steady.round * (int(process.max()) + 1) + process, return_inverse=True)
    last = np.zeros(int(step.max()) + 1, np.int64)
    np.maximum.at(last, step, np.arange(len(step)))
    moved = np.zeros(len(step))
    np.add.at(moved, last[step], seconds)
    return moved


def _sides(connections: Sequence[Connection]) -> tuple[list[object], list[object]]:
    return [connection.forward for connection in connections], [connection.backward for connection in connections]


def _find(steady: Steps, forward: NDArray[np.bool_], stage: Indices, microbatch: Indices) -> tuple[Indices, Indices]:
    """Return the index of each step, and how many repetitions later than this one it is."""
    period, stages = steady.microbatches, int(steady.stage.max()) + 1
    index, first = np.empty((2, stages, period), np.int64), np.full((2, stages), np.iinfo(np.int64).max)
    np.minimum.at(first, (steady.forward.astype(int), steady.stage), steady.microbatch)
    slot = steady.microbatch - first[steady.forward.astype(int), steady.stage]
    index[steady.forward.astype(int), steady.stage, slot] = np.arange(len(slot))
    later, slot = np.divmod(microbatch - first[forward.astype(int), stage], period)
    return index[forward.astype(int), stage, slot], later


def _previous(process: Indices) -> tuple[Indices, Indices]:
    """Return the event before each event in its process, and 1 if that is one repetition earlier, given the process of each."""
    order = np.argsort(process, kind="stable")
    grouped = process[order]
    start, end = np.searchsorted(grouped, grouped), np.searchsorted(grouped, grouped, "right")
    place = np.arange(len(order))
    before, wrapped = np.empty_like(order), np.empty_like(order)
    before[order] = order[np.where(place > start, place - 1, end - 1)]
    wrapped[order] = place == start
    return before, wrapped


def _phases(kinds: Iterable[tuple[Indices, int]]) -> Indices:
    """Return the phases of all events: four in each round. A kind is the rounds of its events, and their place among the four."""
    return np.concatenate([4 * rounds + place for rounds, place in kinds])


def _edge_graph(steps: _Steps, boundary_delays: Indices) -> EventGraph:
    """Events: start of each step, its end after sending, the end of each transfer, and the end of each computation beside another.

    See ``EdgeWires``.
    """
    count, messages = len(steps.process), len(steps.sender)
    start, end = np.arange(count), np.arange(count, 2 * count)
    wire = np.arange(2 * count, 2 * count + messages)
    before, wrapped = _previous(steps.process)
    none, nothing = np.zeros(messages, np.int64), np.zeros(count, np.int64)
    oldest, oldest_before = steps.other_message(boundary_delays[steps.boundary] + 1)
    previous, previous_before = steps.other_message(1)
    ahead = np.array([posted_receives(delay) for delay in boundary_delays.tolist()], np.int64)
    posted, posted_before = steps.other_message(ahead[steps.boundary])
    beside = _Beside.of(steps, steps.process, steps.steady.round, start, before, wrapped)
    alone = np.setdiff1d(start, beside.step)
    done = np.arange(len(beside.step)) + 2 * count + messages  # end of the computation of a backward beside a forward
    at_once = np.zeros(len(done), np.int64)
    edges: list[Edges] = [
        (end[before[alone]], start[alone], (steps.update + steps.late)[before[alone]], wrapped[alone]),
        (start[alone], end[alone], steps.compute[alone], nothing[alone]),
        (end[beside.start], start[beside.step], steps.update[beside.start], beside.started),
        (done[beside.previous], start[beside.step], at_once.astype(float), beside.passed),
        (start[beside.step], done, steps.compute[beside.step], at_once),
        (done, end[beside.step], at_once.astype(float), at_once),
        (end[before[beside.step]], end[beside.step], steps.update[before[beside.step]], wrapped[beside.step]),
        (wire, start[steps.receiver], steps.latency, steps.later),
        (wire[oldest], end[steps.sender], np.zeros(messages), oldest_before),
        (end[steps.sender], wire, steps.transfer, none),
        (wire[previous], wire, steps.transfer, previous_before),
        (start[steps.receiver[posted]], wire, steps.notice + steps.transfer, posted_before - steps.later[posted]),
    ]
    round_ = steps.steady.round
    phases = (round_, round_, round_[steps.sender], round_[beside.step])
    return EventGraph.of(_phases(zip(phases, (0, 2, 3, 1), strict=True)), edges)


def _lockstep_graph(steps: _Steps) -> EventGraph:
    """Events: end of each step with its update, of each exchange of a process, of each transfer, and of each computation beside
    another. See ``LockstepWires``."""
    count, messages = len(steps.process), len(steps.sender)
    round_ = steps.steady.round
    # A process takes part in the exchange of a round in which it sends or a neighbour sends to it.
    taking_part = np.stack([steps.process[steps.sender], steps.process[steps.receiver]])
    key = round_[steps.sender] * (int(steps.process.max()) + 1) + taking_part
    exchanges, exchange = np.unique(key, return_inverse=True)
    exchange = exchange.reshape(key.shape)  # of sender and receiver of each message
    exchange_round, exchange_process = np.divmod(exchanges, int(steps.process.max()) + 1)
    # Events of a process, in order: steps of a round, then its exchange.
    event_round = np.concatenate([round_, exchange_round])
    order = np.argsort(event_round, kind="stable")  # keeps the steps of a round before its exchanges
    process = np.concatenate([steps.process, exchange_process])
    before_sorted, wrapped_sorted = _previous(process[order])
    before, wrapped = np.empty_like(order), np.empty_like(order)
    before[order], wrapped[order] = order[before_sorted], wrapped_sorted
    clock = np.arange(count + len(exchanges))
    wire = np.arange(len(clock), len(clock) + messages)
    seconds = np.concatenate([steps.compute + steps.update, np.zeros(len(exchanges))])
    beside = _Beside.of(steps, process, event_round, order, before, wrapped)
    done = np.arange(len(beside.step)) + len(clock) + messages
    at_once = np.zeros(len(done), np.int64)
    computed, joined = np.arange(len(clock)), seconds.copy()  # the event that a step's computation ends in, and seconds after it
    computed[beside.step] = done
    joined[beside.step] = steps.update[beside.step]
    waiting = np.where(np.isin(steps.receiver, beside.step), steps.compute[steps.receiver], seconds[steps.receiver])
    late = np.concatenate([steps.late, np.zeros(len(exchanges))])
    # An exchange comes after the last step of its round, if its process has any, and before the second parts.
    own = count + np.flatnonzero((before[count:] < count) & (event_round[before[count:]] == exchange_round))
    late[own], late[before[own]] = late[before[own]], 0.0
    # Each sender waits in its next exchange.
    earlier, earlier_wrapped = _previous(exchange_process)
    following, following_wrapped = np.empty_like(earlier), np.empty_like(earlier)
    following[earlier], following_wrapped[earlier] = np.arange(len(exchanges)), earlier_wrapped
    previous, previous_before = steps.other_message(1)
    edges: list[Edges] = [
        (before, clock, joined + late[before], wrapped),
        (done, clock[beside.step], joined[beside.step], at_once),
        (beside.start, done, steps.compute[beside.step], beside.started),
        (done[beside.previous], done, steps.compute[beside.step], beside.passed),
        (wire, computed[steps.receiver], steps.latency + waiting, steps.later),
        (wire, count + following[exchange[0]], np.zeros(messages), following_wrapped[exchange[0]]),
        (wire[previous], wire, steps.transfer, previous_before),
        (before[count + exchange[0]], wire, steps.transfer, wrapped[count + exchange[0]]),
        (before[count + exchange[1]], wire, steps.notice + steps.transfer, wrapped[count + exchange[1]]),
    ]
    phases = (round_, exchange_round, round_[steps.sender], round_[beside.step])
    return EventGraph.of(_phases(zip(phases, (1, 2, 3, 0), strict=True)), edges)
