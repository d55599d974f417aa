"""A port: one end of the boundary between two stages. Workers know nothing else of the outside."""

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
    """Replace an error of torch.distributed by one that names the message it hit.

    Args:
        operation: What was being done, such as ``sending``.
        route: Which message, and between which stages.

    Raises:
        CommunicationError: If the body raises a RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        reason = first_line(error).partition(". ")[0]
        raise CommunicationError(f"{operation} {route}, microbatch {m}: {reason}") from error
