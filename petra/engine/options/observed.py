"""Events of hooks: while a run trains with hooks, methods of its transport, ports, stages and runners also call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from petra.engine.worker import Worker
from petra.hooks import Hooks
from petra.transport import Port, Transport
from petra.transport.port import WrappedPort


class Observed(NamedTuple):
    """A method and its events.

    Attributes:
        method: Name of the method.
        begin: Event before a call; empty for none.
        end: Event after a call; empty for none.
        shown: Maps the arguments and the result to what the event after a call receives.
        given: Maps the arguments to what the event before a call receives.
    """

    method: str
    begin: str
    end: str
    shown: Callable[[Any, Any], tuple[Any, ...]]
    given: Callable[..., tuple[Any, ...]] = tuple


def _microbatch(given: Any, result: Any = None) -> tuple[int]:
    """Return the last microbatch of the update that a part runs."""
    return (given[0].t - 1,)


PORT = (
    Observed("receive", "receive_begin", "receive_end", lambda given, message: (*given, message)),
    Observed("send", "send_begin", "send_end", lambda given, result: given),
)
STAGE = (
    Observed("forward", "forward_begin", "forward_end", lambda given, y: (given[0], y)),
    Observed("backward", "backward_begin", "backward_end", lambda given, result: (given[0], *result)),
)
BLOCK = (
    Observed("forward", "block_forward_begin", "", lambda given, y: ()),
    Observed("backward", "", "block_backward_end", lambda given, result: (given[0], result[0], result[2])),
)
EXCHANGE = (Observed("exchange", "exchange_begin", "exchange_end", lambda given, result: (), lambda given: ()),)


@contextmanager
def observing(workers: Mapping[int, Worker], blocks: Sequence[range], hooks: Hooks, transport: Transport) -> Iterator[None]:
    """Emit the events of attached hooks inside the ``with`` block. No method is replaced whose events no hook overrides.

    Args:
        blocks: Indices of the blocks of each stage in the model.
    """
    observed: list[tuple[Any, tuple[int, ...], Sequence[Observed]]] = [(transport, (max(workers, default=-1),), EXCHANGE)]
    for j, worker in workers.items():
        observed += [(_innermost(worker.upstream), (j, j - 1), PORT), (_innermost(worker.downstream), (j, j + 1), PORT)]
        observed += [(runner, (j, block), BLOCK) for block, runner in zip(blocks[j], worker.stage.runners, strict=True)]
        observed.append((worker.stage, (j,), STAGE))
        observed += [(part, (j,), (Observed("run", *part.events, _microbatch, _microbatch),)) for part in worker.update.parts]
    methods = [(*entry, method, hooks.calls(method.begin), hooks.calls(method.end)) for *entry, each in observed for method in each]
    replaced = [entry for entry in methods if any(entry[3:])]
    for owner, place, method, begin, end in replaced:
        setattr(owner, method.method, _observed(getattr(owner, method.method), method, place, begin, end))
    try:
        yield
    finally:
        for owner, _, method, *_ in replaced:
            delattr(owner, method.method)


def _innermost(port: Port) -> Port:
    while isinstance(port, WrappedPort):
        port = port.inner
    return port


def _observed(call: Any, method: Observed, place: tuple[int, ...], begin: Sequence[Any], end: Sequence[Any]) -> Any:
    """Return a method that calls the methods ``begin`` and ``end`` of hooks around ``call``. Its name lists all of them."""

    def call_with_hooks(*given: Any) -> Any:
        for hook in begin:
            hook(*place, *method.given(given))
        result = call(*given)
        for hook in end:
            hook(*place, *method.shown(given, result))
        return result

    call_with_hooks.__qualname__ = ", ".join(getattr(each, "__qualname__", type(each).__name__) for each in (*begin, call, *end))
    return call_with_hooks
