"""Collectives on Python values, and errors that every rank raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from petra.errors import PetraError


def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank. Without a process group, return ``[value]``.

    Args:
        value: Any object that can be pickled.
        group: A process group of all ranks. None uses the default group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise the same error on every rank if the body raises a :class:`PetraError` on any rank.

    Every rank must enter the context. Without it, the other ranks would wait in the next collective for the rank that failed.

    Raises:
        PetraError: If the body fails on some rank. The text has each distinct message on a line of its own.
    """
    message = None
    try:
        yield
    except PetraError as error:
        message = str(error)
    messages = dict.fromkeys(m for m in all_gather_objects(message, group) if m is not None)
    if messages:
        raise PetraError("\n".join(messages))
