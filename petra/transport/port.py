"""Ports: the ends of the boundaries between stages. Workers communicate only through ports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from petra.errors import CommunicationError, first_line
from petra.specs import Message


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
