"""Collectives on Python values, errors that every rank raises, and the device of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from petra.errors import ConfigError, DataError, ModelError, PetraError, invalid, require
from petra.torch_private import default_group_timeout

SAME_KIND = {ConfigError, DataError, ModelError}
"""Classes of errors that :func:`raise_on_all_ranks` keeps. Their messages are all that they need."""
run_collective: ContextVar[Callable[[Callable[[], object]], object]] = ContextVar("run_collective", default=lambda call: call())
"""Runs a collective of :func:`all_gather_objects`. An elastic run ends it if another process is lost (:mod:`petra.elastic`)."""


_messages: list[Callable[[], dist.ProcessGroup | None]] = [lambda: None]


def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None, call: str | None = None) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank. Without a process group, return ``[value]``.

    Args:
        value: Any object that can be pickled.
        group: A process group of all ranks. None uses the default group.
        call: The caller's call, which every rank must make at this point, in words for the error.

    Raises:
        PetraError: If ranks make different calls. Raised on every rank.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    run_collective.get()(partial(dist.all_gather_object, found, (call, value), group))
    for rank, (other, _) in enumerate(found):
        got = f"{found[0][0] or 'another call'} on rank 0 and {other or 'another call'} on rank {rank}"
        require(other == found[0][0], "calls", "the same on all ranks, in the same order", got, PetraError)
    return [value for _, value in found]


def message_group() -> dist.ProcessGroup | None:
    """Return the group for messages between two ranks; None for that of the caller. Every rank must call this function.

    With ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, torch numbers the operations of each rank in a group, messages included, and compares
    the numbers at each collective. Ranks send different numbers of messages, so these have a group without collectives.
    """
    if not dist.is_initialized() or c10d.get_debug_level() != c10d.DebugLevel.DETAIL:
        return None
    group = _messages[0]()
    if group is None:
        group = dist.new_group(timeout=default_group_timeout(torch.device("cpu")))
        _messages[0] = ref(group)
        dist.barrier(group)  # batch_isend_irecv must not be its first operation
    return group


def bind_device(device: torch.device | str) -> torch.device:
    """Make a GPU the current device of this process, and return the device with its index.

    Without an index, a GPU is the one that the process group is bound to, or else the current device. NCCL, CUDA events and pinned
    memory use the current device.

    Raises:
        ConfigError: If the machine has no such GPU, or the process group is bound to another one or to none.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return device
    bound = None
    if dist.is_available() and dist.is_initialized():
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        if bound is None:
            expected = "backend='cpu:gloo,cuda:nccl' with device_id=<the GPU of this rank>"
            raise invalid("init_process_group", expected, "no device_id")
    require(torch.cuda.is_available(), "device", "cpu on a machine without GPUs", device)
    if device.index is None:
        device = bound or torch.device("cuda", torch.cuda.current_device())
    require(bound in (None, device), "device", f"{bound}, to which init_process_group bound this rank", device)
    count = torch.cuda.device_count()
    require(device.index < count, "device", f"a GPU from cuda:0 to cuda:{count - 1}", device)
    torch.cuda.set_device(device)
    return device


def is_communication_error(error: Exception) -> bool:
    """Return whether torch.distributed raised the error. gloo has no error class of its own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None, call: str | None = None) -> Iterator[None]:
    """Raise the same error on every rank if the body raises a :class:`PetraError` on any rank.

    Every rank must enter the context, in the same ``call`` (:func:`all_gather_objects`). Without it, the other ranks would wait in
    the next collective for the rank that failed.

    Raises:
        PetraError: If the body raises one on any rank. The text contains each distinct message on its own line. If all errors are
            of one class of :data:`SAME_KIND`, so is this one.
    """
    own = None
    try:
        yield
    except PetraError as error:
        own = error
    found = all_gather_objects(None if own is None else (type(own), str(own)), group, call)
    messages = dict.fromkeys(error for error in found if error is not None)
    if messages:
        if own is not None and len(messages) == 1:
            raise own
        kinds = {kind for kind, _ in messages}
        kind = kinds.pop() if len(kinds) == 1 and kinds <= SAME_KIND else PetraError
        raise kind("\n".join(dict.fromkeys(message for _, message in messages))) from own
