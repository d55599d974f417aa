"""Messages between stages of one process. They are passed by reference, and rounded to the wire dtype if there is one."""

from __future__ import annotations

from collections import deque

from petra.specs import Message, MessageSpec
from petra.transport.packing import round_to_wire


class LocalPort:
    """A port whose neighbour is in the same process."""

    def __init__(self, spec: MessageSpec, outgoing: deque[Message], incoming: deque[Message]) -> None:
        self._spec, self._outgoing, self._incoming = spec, outgoing, incoming
        self._rounds = any(tensor.wire is not None for part in spec for tensor in part)

    def send(self, m: int, message: Message) -> None:
        """See :class:`petra.transport.Port`."""
        self._outgoing.append(round_to_wire(message, self._spec) if self._rounds else message)

    def receive(self, m: int) -> Message:
        """See :class:`petra.transport.Port`."""
        return self._incoming.popleft()


def local_boundary(forward: MessageSpec, backward: MessageSpec) -> tuple[LocalPort, LocalPort]:
    """Return the downstream port of one stage and the upstream port of the next."""
    down: deque[Message] = deque()
    up: deque[Message] = deque()
    return LocalPort(forward, down, up), LocalPort(backward, up, down)
