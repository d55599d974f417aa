"""What a stage does when, as plain data: the same for recorded runs and for simulated ones."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "update"
    LOSS = "loss"
    """The loss and its gradient, on the last stage."""
    SEND = "send"
    """Handing a message over, and waiting for room for it."""
    RECEIVE = "receive"
    """Taking a message in that has left its sender, or a microbatch of data."""
    WAIT = "wait"
    """Until a neighbour sends."""


class Interval(NamedTuple):
    """Times in seconds from one origin for all stages."""

    stage: int
    kind: Kind
    microbatch: int
    start: float
    stop: float
    peer: int | None = None
    """The stage at the other end of a send, receive or wait."""


def split_waits(intervals: Sequence[Interval]) -> list[Interval]:
    """Cuts each receive at the moment its message left the sender: before it the stage waited, after it the message travelled."""
    sent: dict[tuple[int | None, int | None, int], float] = {
        (i.stage, i.peer, i.microbatch): i.stop for i in intervals if i.kind is Kind.SEND
    }
    parts: list[Interval] = []
    for interval in intervals:
        left = sent.get((interval.peer, interval.stage, interval.microbatch), interval.start)
        if interval.kind is Kind.RECEIVE and left > interval.start:
            parts.append(interval._replace(kind=Kind.WAIT, stop=min(left, interval.stop)))
            interval = interval._replace(start=min(left, interval.stop))
        parts.append(interval)
    return parts
