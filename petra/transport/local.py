"""Messages between stages of one process: references, nothing copied."""

from __future__ import annotations

from collections import deque

from petra.streams import Message


class LocalPort:
    def __init__(self, outgoing: deque[Message], incoming: deque[Message]) -> None:
        self._outgoing, self._incoming = outgoing, incoming

    def send(self, m: int, message: Message) -> None:
        self._outgoing.append(message)

    def receive(self, m: int) -> Message:
        return self._incoming.popleft()


def local_boundary() -> tuple[LocalPort, LocalPort]:
    """The two ends of a boundary inside one process: the downstream port of one stage, the upstream port of the next."""
    down: deque[Message] = deque()
    up: deque[Message] = deque()
    return LocalPort(down, up), LocalPort(up, down)
