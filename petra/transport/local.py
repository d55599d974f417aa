"""Messages between stages of one process. They are passed by reference, and rounded as their format rounds them."""

from __future__ import annotations

from collections import deque

from petra.specs import Message, MessageSpec, PackedPart, in_own_memory
from petra.transport.port import Transport, WrappedPort


class LocalPort:
    """A port whose neighbour is in the same process."""

    def __init__(self, spec: MessageSpec, outgoing: deque[Message], incoming: deque[Message]) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        rounds = any(tensor.message_format is not None for part in spec for tensor in part)
        self._parts = [PackedPart(part) for part in spec] if rounds else []

    def send(self, m: int, message: Message) -> None:
        """See :class:`petra.transport.Port`."""
        if self._parts:
            message = tuple([part.unpack(part.pack(tensors)) for part, tensors in zip(self._parts, message, strict=True)])
        self._outgoing.append(message)

    def receive(self, m: int) -> Message:
        """See :class:`petra.transport.Port`."""
        return self._incoming.popleft()


class LocalTransport(Transport):
    """Transport of a run in one process, which has no neighbours."""


class OwningPort(WrappedPort):
    """Port that sends copies of tensors that are parts of a larger memory.

    A stage may pass on views of what it has received from another process, which would keep the whole message alive until the
    neighbour's backward pass.
    """

    def send(self, m: int, message: Message) -> None:
        self.inner.send(m, tuple(tuple(in_own_memory(t) for t in part) for part in message))


def local_boundary(forward: MessageSpec, backward: MessageSpec) -> tuple[LocalPort, LocalPort]:
    """Return the downstream port of one stage and the upstream port of the next."""
    down: deque[Message] = deque()
    up: deque[Message] = deque()
    return LocalPort(forward, down, up), LocalPort(backward, up, down)
