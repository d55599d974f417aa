"""All processes of a run at one point: their values, and one error for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from petra.errors import PetraError


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all processes, in every process.

    Args:
        group: of all processes, to talk over; None for the one that all have.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


@contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Ends in the same error in every process if the body raises one in any of them, so that none waits for one that failed."""
    message = None
    try:
        yield
    except PetraError as error:
        message = str(error)
    messages = dict.fromkeys(m for m in gathered(message, group) if m is not None)
    if messages:
        raise PetraError("\n".join(messages))
