"""Hooks: objects that observe a run by overriding the events of :class:`Hook`.

Recorder, stage metrics and diagnostics subclass :class:`Hook`, override the events that they need, and are attached to a pipeline::

    with pipeline.hooks.attached(Recorder(pipeline)) as recorder:
        pipeline.train(data, microbatches)

Only overridden events are called: nothing is wrapped for an event that no hook overrides. Evaluation emits no events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TypeVar

from torch import Tensor, nn

from petra.errors import require
from petra.specs import Message, Streams

H = TypeVar("H", bound="Hook")
Gradients = Mapping[nn.Parameter, Tensor]
"""Gradient of each parameter of a block."""


class Hook:
    """Base class of observers. Every event does nothing by default.

    Stages, blocks and microbatches ``m`` count from 0; ``block`` is an index into the whole model. ``x``, ``y``, ``dx``, ``dy`` and
    the parts of messages are tuples of the run's own tensors (B, ...): clone what you keep, and never write to them. Events come
    in the stage's thread, with gradients disabled. If an exception ends a run, ``_end`` events of unfinished work are not emitted.
    """

    def train_begin(self, start: int, stop: int) -> None:
        """``Pipeline.train`` starts; it trains on microbatches ``start`` ... ``stop`` - 1, or fewer if it stops early."""

    def train_end(self) -> None:
        """``Pipeline.train`` has drained the pipeline."""

    def forward_begin(self, stage: int, m: int, x: Streams) -> None:
        """A stage starts the forward pass of microbatch ``m`` on its input ``x``."""

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        """A stage has computed its output ``y``."""

    def backward_begin(self, stage: int, m: int, y: Streams, dy: Streams) -> None:
        """A stage starts the backward pass with its output ``y`` (empty unless it reconstructs) and the gradient ``dy``.

        Under a loss scale, ``dy`` and all gradients inside the stage are multiplied by it.
        """

    def backward_end(self, stage: int, m: int, x: Streams, dx: Streams) -> None:
        """A stage has computed its input ``x`` (empty unless the stage before reconstructs) and the gradient ``dx``."""

    def block_forward_begin(self, stage: int, block: int, m: int, x: Streams) -> None:
        """A block starts the forward pass of microbatch ``m`` on its input ``x``."""

    def block_backward_end(self, stage: int, block: int, m: int, x: Streams, gradients: Gradients) -> None:
        """A block has computed its input ``x`` and its parameters' ``gradients``, of which 1/k is then added to ``.grad``."""

    def update_begin(self, stage: int, m: int) -> None:
        """A stage starts the optimizer step after the backward pass of microbatch ``m``."""

    def update_end(self, stage: int, m: int) -> None:
        """A stage has updated its weights."""

    def all_reduce_begin(self, stage: int, m: int) -> None:
        """A stage starts to wait for the sum of its gradients over replicas."""

    def all_reduce_end(self, stage: int, m: int) -> None:
        """A stage's gradients are the sum over replicas."""

    def receive_begin(self, stage: int, peer: int, m: int) -> None:
        """A stage starts to wait for a message from stage ``peer``: -1 for the data, the number of stages for the loss."""

    def receive_end(self, stage: int, peer: int, m: int, message: Message) -> None:
        """A stage has received a message."""

    def send_begin(self, stage: int, peer: int, m: int, message: Message) -> None:
        """A stage starts to send a message to stage ``peer``, numbered as in :meth:`receive_begin`."""

    def send_end(self, stage: int, peer: int, m: int, message: Message) -> None:
        """The transport has accepted the message, but may not have sent it yet."""

    def exchange_begin(self, stage: int) -> None:
        """A process starts a lockstep exchange; ``stage`` is the last of its stages."""

    def exchange_end(self, stage: int) -> None:
        """A process has posted a lockstep exchange, whose messages may still be on their way."""


class Hooks(list[Hook]):
    """The hooks attached to a pipeline, in the order in which they are called. Append one to attach it for good."""

    def append(self, hook: Hook) -> None:
        """Attach a hook for good.

        Raises:
            ConfigError: If it is no hook, or has a method that would never be called, because its name is almost that of an event.
        """
        require(isinstance(hook, Hook), "hook", "an object of a subclass of petra.Hook", repr(hook))
        events = [name for name in vars(Hook) if not name.startswith("_")]
        for name in vars(type(hook)).keys() - vars(Hook).keys():
            near = get_close_matches(name, events, 1, 0.9)
            require(not near, type(hook).__name__, f"the event {''.join(near)}", name)
        super().append(hook)

    def calls(self, event: str) -> list[Callable[..., None]]:
        """Return the methods to call at an event: those of the hooks that override it. None for an empty name."""
        return [getattr(hook, event) for hook in self if event and getattr(type(hook), event) is not getattr(Hook, event)]

    @contextmanager
    def attached(self, hook: H) -> Iterator[H]:
        """Attach ``hook`` for the duration of the ``with`` block, and return it as the block's target."""
        self.append(hook)
        try:
            yield hook
        finally:
            self.remove(hook)
