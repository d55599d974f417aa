"""Events of hooks: while a run trains with hooks, methods of ports, stages and runners emit them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from petra.engine.worker import Worker
from petra.hooks import Hooks
from petra.transport.port import WrappedPort

Calls = tuple[Callable[..., None], ...]


@contextmanager
def observing(workers: Mapping[int, Worker], blocks: Sequence[range] | Mapping[int, range], hooks: Hooks) -> Iterator[None]:
    """Emit the events of attached hooks inside the ``with`` block. Nothing is replaced for events that no hook overrides.

    Args:
        blocks: Indices of the blocks of each stage in the model.
    """
    with ExitStack() as stack:
        for j, worker in workers.items():
            for port, peer in ((worker.upstream, j - 1), (worker.downstream, j + 1)):
                while isinstance(port, WrappedPort):
                    port = port.inner
                _observe(stack, port, "receive", (j, peer), hooks.receive_begin, hooks.receive_end, lambda message: (message,))
                _observe(stack, port, "send", (j, peer), hooks.send_begin, hooks.send_end)
            stage = worker.stage
            for block, runner in zip(blocks[j], stage.runners, strict=True):
                _observe(stack, runner, "forward", (j, block), hooks.block_forward_begin, ())
                _observe(stack, runner, "backward", (j, block), (), hooks.block_backward_end, lambda found: (found[0], found[2]))
            _observe(stack, stage, "forward", (j,), hooks.forward_begin, hooks.forward_end, lambda y: (y,))
            _observe(stack, stage, "backward", (j,), hooks.backward_begin, hooks.backward_end, lambda found: found)
        yield


def _observe(
    stack: ExitStack,
    owner: object,
    method: str,
    place: tuple[int, ...],
    begin: Calls,
    end: Calls,
    results: Callable[[Any], tuple[Any, ...]] | None = None,
) -> None:
    """Replace a method of one object by one that emits events, until ``stack`` is closed.

    Args:
        place: First arguments of the events. The method's arguments follow.
        begin, end: What to call before and after the method.
        results: Maps the method's result to the last arguments of ``end``, which come after the microbatch. None passes the
            method's arguments again.
    """
    if not (begin or end):
        return
    call = getattr(owner, method)

    def observed(m: int, *arguments: Any) -> Any:
        for event in begin:
            event(*place, m, *arguments)
        result = call(m, *arguments)
        for event in end:
            event(*place, m, *(arguments if results is None else results(result)))
        return result

    setattr(owner, method, observed)
    stack.callback(delattr, owner, method)
