"""A port: one stage's end of the boundary to a neighbour. Workers know nothing else of the outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from petra.errors import CommunicationError, first_line
from petra.specs import Message


class Port(Protocol):
    """Messages are sent and received in the order of their microbatches; both ends know that order before the run."""

    def send(self, m: int, message: Message) -> None:
        """Hands over the message of microbatch m and returns; its tensors may be used on, but not changed."""

    def receive(self, m: int) -> Message:
        """The neighbour's message for microbatch m, waiting for it if need be; its tensors are the receiver's."""


@contextmanager
def named(operation: str, route: str, m: int) -> Iterator[None]:
    """Tells of an error of torch.distributed which message it hit.

    Raises:
        CommunicationError: in its place.
    """
    try:
        yield
    except RuntimeError as error:
        reason = first_line(error).partition(". ")[0]
        raise CommunicationError(f"{operation} {route}, microbatch {m}: {reason}") from error
