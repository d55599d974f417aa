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
    observed: list[tuple[Any, Sequence[Observed], tuple[int, ...]]] = [(transport, EXCHANGE, (max(workers, default=-1),))]
    for j, worker in workers.items():
        observed += [(_innermost(worker.upstream), PORT, (j, j - 1)), (_innermost(worker.downstream), PORT, (j, j + 1))]
        observed += [(runner, BLOCK, (j, block)) for block, runner in zip(blocks[j], worker.stage.runners, strict=True)]
        observed.append((worker.stage, STAGE, (j,)))
        observed += [(part, (Observed("run", *part.events, _microbatch, _microbatch),), (j,)) for part in worker.update.parts]
    methods = [(owner, method, place) for owner, each, place in observed for method in each]
    replaced = [entry for entry in methods if any(getattr(hooks, event) for event in (entry[1].begin, entry[1].end) if event)]
    for owner, method, place in replaced:
        setattr(owner, method.method, _emitting(getattr(owner, method.method), method, place, hooks))
    try:
        yield
    finally:
        for owner, method, _ in replaced:
            delattr(owner, method.method)


def _innermost(port: Port) -> Port:
    while isinstance(port, WrappedPort):
        port = port.inner
    return port


def _emitting(call: Callable[..., Any], method: Observed, place: tuple[int, ...], hooks: Hooks) -> Callable[..., Any]:
    def emitting(*given: Any) -> Any:
        for begin in getattr(hooks, method.begin) if method.begin else ():
            begin(*place, *method.given(given))
        result = call(*given)
        for end in getattr(hooks, method.end) if method.end else ():
            end(*place, *method.shown(given, result))
        return result

    return emitting
