"""Messages between stages of one process: references, nothing copied, but rounded where others would be on the wire."""

from __future__ import annotations

from collections import deque

from petra.specs import Message, MessageSpec
from petra.transport.packing import rounded


class LocalPort:
    def __init__(self, spec: MessageSpec, outgoing: deque[Message], incoming: deque[Message]) -> None:
        self._spec, self._outgoing, self._incoming = spec, outgoing, incoming
        self._rounds = any(tensor.wire is not None for part in spec for tensor in part)

    def send(self, m: int, message: Message) -> None:
        self._outgoing.append(rounded(message, self._spec) if self._rounds else message)

    def receive(self, m: int) -> Message:
        return self._incoming.popleft()


def local_boundary(forward: MessageSpec, backward: MessageSpec) -> tuple[LocalPort, LocalPort]:
    """The two ends of a boundary inside one process: the downstream port of one stage, the upstream port of the next."""
    down: deque[Message] = deque()
    up: deque[Message] = deque()
    return LocalPort(forward, down, up), LocalPort(backward, up, down)
