"""Intervals of time in which a stage does something. Recorded and simulated runs use the same records."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a stage does in an interval."""

    FORWARD = "F"
    BACKWARD = "B"
    """Backward pass; in a simulation of ZB-H1, without the gradients of the parameters."""
    BACKWARD_WEIGHTS = "W"
    """Gradients of the parameters, in a simulation of ZB-H1."""
    UPDATE = "update"
    LOSS = "loss"
    """Loss and its gradient, on the last stage."""
    SEND = "send"
    """Hand over a message, including the wait for room."""
    RECEIVE = "receive"
    """Receive a message that has left its sender, or load a microbatch of data."""
    WAIT = "wait"
    """Wait for a neighbour to send."""


class Interval(NamedTuple):
    """What a stage does from ``start`` to ``stop``.

    Attributes:
        start, stop: Seconds. All stages have the same origin.
        peer: The stage at the other end of a send, receive or wait.
    """

    stage: int
    kind: Kind
    microbatch: int
    start: float
    stop: float
    peer: int | None = None


def split_waits(intervals: Sequence[Interval]) -> list[Interval]:
    """Split each receive at the time when its message left the sender.

    The first part becomes a wait; in the second part, the message was on its way.
    """
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
