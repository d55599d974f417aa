"""Workers that emit the events of hooks. A worker is wrapped only while a run trains with hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from petra.engine.block import BlockRunner, WrappedRunner
from petra.engine.stage import Stage
from petra.engine.worker import Worker
from petra.hooks import Hooks
from petra.reversible import Gradients
from petra.specs import Message, Streams
from petra.transport import Port
from petra.transport.port import WrappedPort

PORT = ("receive_begin", "receive_end", "send_begin", "send_end")
STAGE = ("forward_begin", "forward_end", "backward_begin", "backward_end")
BLOCK = ("block_forward_begin", "block_backward_end")


@contextmanager
def observing(workers: Mapping[int, Worker], blocks: Sequence[range] | Mapping[int, range], hooks: Hooks) -> Iterator[None]:
    """Emit the events of attached hooks inside the ``with`` block. Nothing is wrapped for events that no hook overrides.

    Args:
        blocks: Indices of the blocks of each stage in the model.
    """
    with ExitStack() as stack:
        for j, worker in workers.items():
            if any(getattr(hooks, event) for event in PORT):
                for side, peer in (("upstream", j - 1), ("downstream", j + 1)):
                    owner, name = _innermost(worker, side)
                    stack.enter_context(_replaced(owner, name, ObservedPort(getattr(owner, name), j, peer, hooks)))
            if any(getattr(hooks, event) for event in BLOCK):
                stage = worker.stage
                observed = zip(blocks[j], stage.runners, strict=True)
                runners = [ObservedRunner(runner, j, block, hooks) for block, runner in observed]
                stack.enter_context(_replaced(stage, "runners", runners))
            if any(getattr(hooks, event) for event in STAGE):
                stack.enter_context(_replaced(worker, "stage", ObservedStage(worker.stage, j, hooks)))
        yield


def _innermost(owner: Any, name: str) -> tuple[Any, str]:
    """Return where the innermost port of a chain of wrapped ports is stored."""
    while isinstance(getattr(owner, name), WrappedPort):
        owner, name = getattr(owner, name), "inner"
    return owner, name


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class ObservedPort(WrappedPort):
    """Port of stage ``stage`` to stage ``peer`` that emits the events of messages."""

    def __init__(self, inner: Port, stage: int, peer: int, hooks: Hooks) -> None:
        super().__init__(inner)
        self._stage, self._peer, self._hooks = stage, peer, hooks

    def send(self, m: int, message: Message) -> None:
        for begin in self._hooks.send_begin:
            begin(self._stage, self._peer, m, message)
        self.inner.send(m, message)
        for end in self._hooks.send_end:
            end(self._stage, self._peer, m, message)

    def receive(self, m: int) -> Message:
        for begin in self._hooks.receive_begin:
            begin(self._stage, self._peer, m)
        message = self.inner.receive(m)
        for end in self._hooks.receive_end:
            end(self._stage, self._peer, m, message)
        return message


class ObservedStage:
    """Stage that emits the events of its passes. Everything else is the stage's own."""

    def __init__(self, stage: Stage, index: int, hooks: Hooks) -> None:
        self._stage, self._index, self._hooks = stage, index, hooks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(self, m: int, x: Streams) -> Streams:
        """See :meth:`petra.engine.stage.Stage.forward`."""
        for begin in self._hooks.forward_begin:
            begin(self._index, m, x)
        y = self._stage.forward(m, x)
        for end in self._hooks.forward_end:
            end(self._index, m, y)
        return y

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams]:
        """See :meth:`petra.engine.stage.Stage.backward`."""
        for begin in self._hooks.backward_begin:
            begin(self._index, m, y, dy)
        x, dx = self._stage.backward(m, y, dy)
        for end in self._hooks.backward_end:
            end(self._index, m, x, dx)
        return x, dx


class ObservedRunner(WrappedRunner):
    """Runner of block ``block`` of stage ``stage`` that emits the events of its passes."""

    def __init__(self, inner: BlockRunner, stage: int, block: int, hooks: Hooks) -> None:
        super().__init__(inner)
        self._stage, self._block, self._hooks = stage, block, hooks

    def forward(self, m: int, x: Streams) -> Streams:
        for begin in self._hooks.block_forward_begin:
            begin(self._stage, self._block, m, x)
        return self.inner.forward(m, x)

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        x, dx, gradients = self.inner.backward(m, y, dy)
        for end in self._hooks.block_backward_end:
            end(self._stage, self._block, m, x, gradients)
        return x, dx, gradients
