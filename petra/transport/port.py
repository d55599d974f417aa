"""Ports: the ends of the boundaries between stages. Workers communicate only through ports.

A transport has the ports to other processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from petra.errors import CommunicationError, first_line
from petra.plan.timetable import Step
from petra.specs import Message
from petra.transport.packing import Packing


class Port(Protocol):
    """Sends and receives messages in the order of their microbatches, which both ends know before the run."""

    def send(self, m: int, message: Message) -> None:
        """Hand over the message of microbatch m. Its tensors may be read afterwards, but not changed."""

    def receive(self, m: int) -> Message:
        """Wait for the neighbour's message for microbatch m and return it. The caller owns its tensors."""


@contextmanager
def locate_errors(operation: str, route: str, m: int) -> Iterator[None]:
    """Convert errors of torch.distributed in the body to errors that name the message.

    Args:
        operation: Operation in progress, such as ``sending``.
        route: Description of the message, such as ``the message of stage 1 to stage 2``.
        m: Microbatch of the message.

    Raises:
        CommunicationError: If the body raises a RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        reason = first_line(error).partition(". ")[0]
        raise CommunicationError(f"{operation} {route}, microbatch {m}: {reason}") from error


class WrappedPort:
    """Base class of ports that change or observe the messages of another port.

    Args:
        inner: The other port.
    """

    def __init__(self, inner: Port) -> None:
        self.inner = inner

    def send(self, m: int, message: Message) -> None:
        """See :class:`Port`."""
        self.inner.send(m, message)

    def receive(self, m: int) -> Message:
        """See :class:`Port`."""
        return self.inner.receive(m)


class RemotePort(Port, Protocol):
    """Port whose neighbour is in another process.

    Attributes:
        outgoing, incoming: Packing of the messages in each direction.
    """

    outgoing: Packing
    incoming: Packing


class Transport:
    """Ports of one process to its neighbours. Subclasses override what their messages need; here, nothing is to be done.

    Attributes:
        upstream, downstream: Ports to the processes before and after this one; None if there is none.
    """

    upstream: RemotePort | None = None
    downstream: RemotePort | None = None

    def begin(self, microbatches: int, backward: bool) -> None:
        """Prepare for a run over ``microbatches``, with or without backward messages."""

    def shorten(self, messages: int) -> None:
        """Expect ``messages`` fewer than :meth:`begin` announced, in each direction."""

    def transfers(self, steps: Sequence[Step]) -> Sequence[Any]:
        """Return what this process sends and receives in an exchange after a round with these ``steps``."""
        return ()

    def exchange(self, transfers: Sequence[Any], shift: int) -> None:
        """Make an exchange. Add ``shift`` to the microbatches of ``transfers``."""

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
