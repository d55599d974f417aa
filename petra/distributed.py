"""Collectives on Python values, errors that every rank raises, and the timeout of process groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

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


def default_timeout(device: torch.device) -> timedelta:
    """Return the timeout of the default group, which new groups must be given. They would otherwise use torch's own, 30 minutes."""
    timeout: timedelta = _get_default_group()._get_backend(device).options._timeout
    return timeout


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise the same error on every rank if the body raises a :class:`PetraError` on any rank.

    Every rank must enter the context. Without it, the other ranks would wait in the next collective for the rank that failed.

    Raises:
        PetraError: If the body raises one on any rank. The text contains each distinct message on its own line.
    """
    message = None
    try:
        yield
    except PetraError as error:
        message = str(error)
    messages = dict.fromkeys(m for m in all_gather_objects(message, group) if m is not None)
    if messages:
        raise PetraError("\n".join(messages))
