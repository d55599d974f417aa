"""Transport with one grouped exchange with both neighbours after each round, in the same order on every rank.

A grouped exchange, one ``batch_isend_irecv`` of all messages of a round, cannot deadlock. At d = 2 all stages run F in the same
rounds and B in the others. A message is needed only after the round that follows its exchange, and travels during that round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from petra.plan.timetable import Op, Step
from petra.specs import Message
from petra.transport.packing import Packing
from petra.transport.port import Transport, locate_errors


class Operation(NamedTuple):
    """A send or a receive of an exchange."""

    sends: bool
    buffer: Tensor
    peer: int
    group: dist.ProcessGroup | None


class Handle(Protocol):
    """Part of :class:`torch.distributed.Work`."""

    def wait(self) -> object:
        """Wait until the operation has ended; on a GPU, only the CUDA stream waits."""


Post = Callable[[Sequence[Operation]], Sequence[Handle]]
"""Starts the operations of an exchange. Returns a handle for each, or one for all."""


def post(operations: Sequence[Operation]) -> Sequence[Handle]:
    """Start operations as one group of torch.distributed."""
    return dist.batch_isend_irecv([dist.P2POp([dist.irecv, dist.isend][o.sends], o.buffer, o.peer, o.group) for o in operations])


@dataclass
class LockstepPort:
    """A port whose neighbour is in another process; see :class:`petra.transport.Port`.

    Attributes:
        outgoing, incoming: Packing of the messages in each direction.
        peer: Rank of the neighbour.
        group: Ranks of the replica; None for the default group.
    """

    outgoing: Packing
    incoming: Packing
    peer: int
    group: dist.ProcessGroup | None
    _outbox: deque[Tensor] = field(default_factory=deque)
    _inbox: deque[tuple[Handle, Tensor]] = field(default_factory=deque)

    def send(self, m: int, message: Message) -> None:
        """Pack a message for the exchange after this round. An update of the stage in the same round comes before it."""
        self._outbox.append(self.outgoing.pack(message))

    def receive(self, m: int) -> Message:
        work, buffer = self._inbox.popleft()
        with locate_errors("receiving", self.incoming.route, m):
            work.wait()
        return self.incoming.unpack(buffer)

    def operation(self, sends: bool) -> Operation:
        """Return the operation that sends the oldest message handed over, or one that receives a message."""
        return Operation(sends, self._outbox.popleft() if sends else self.incoming.buffer(), self.peer, self.group)

    def add_posted(self, work: Handle, buffer: Tensor) -> None:
        """Add a receive that has been posted into ``buffer``."""
        self._inbox.append((work, buffer))


class Transfer(NamedTuple):
    """A message that is sent or received in an exchange."""

    port: LockstepPort
    sends: bool
    microbatch: int


class LockstepTransport(Transport):
    """The ports of one rank. All messages are transferred by :meth:`exchange`.

    Args:
        boundaries: Forward packing, backward packing and delay d of each boundary between neighbouring processes of a replica.
        stages: Stages of each process of a replica.
        rank: Rank of this process.
        group: Ranks of this replica; None if there is only one replica.
        stride: Distance of the ranks of neighbouring processes.
        post: Starts the operations of an exchange.
    """

    upstream: LockstepPort | None = None
    downstream: LockstepPort | None = None

    def __init__(
        self,
        boundaries: Sequence[tuple[Packing, Packing, int]],
        stages: Sequence[range],
        rank: int,
        group: dist.ProcessGroup | None = None,
        stride: int = 1,
        post: Post = post,
    ) -> None:
        process = rank // stride % len(stages)
        if 0 < process <= len(boundaries):
            forward, backward, _ = boundaries[process - 1]
            self.upstream = LockstepPort(outgoing=backward, incoming=forward, peer=rank - stride, group=group)
        if process < len(boundaries):
            forward, backward, _ = boundaries[process]
            self.downstream = LockstepPort(outgoing=forward, incoming=backward, peer=rank + stride, group=group)
        self._stages, self._post = stages[process], post
        self._sent: deque[tuple[LockstepPort, int, Handle, Tensor]] = deque()

    def transfers(self, steps: Sequence[Step]) -> Sequence[Transfer]:
        """Return what this rank sends and receives after a round with these ``steps``, in the same order on every rank."""
        found: list[Transfer] = []
        mine = self._stages
        for _, stage, op, m in steps if mine else ():
            if self.downstream and op is Op.FORWARD and stage == mine[-1]:
                found.append(Transfer(self.downstream, True, m))
            elif self.upstream and op is Op.FORWARD and stage == mine[0] - 1:
                found.append(Transfer(self.upstream, False, m))
            elif self.upstream and op is Op.BACKWARD and stage == mine[0]:
                found.append(Transfer(self.upstream, True, m))
            elif self.downstream and op is Op.BACKWARD and stage == mine[-1] + 1:
                found.append(Transfer(self.downstream, False, m))
        return found

    def exchange(self, transfers: Sequence[Transfer], shift: int) -> None:
        """Post one grouped exchange with both neighbours. Add ``shift`` to the microbatches of ``transfers``."""
        operations = [port.operation(sends) for port, sends, _ in transfers]
        port, sends, m = transfers[0]
        with locate_errors("exchanging", f"{(port.outgoing if sends else port.incoming).route} and back", m + shift):
            works = self._post(operations)
        self.finish()  # wait for what the previous exchange sent
        for i, ((port, sends, m), operation) in enumerate(zip(transfers, operations, strict=True)):
            # NCCL returns one handle for the whole group, gloo one for each operation.
            work = works[min(i, len(works) - 1)]
            if sends:
                self._sent.append((port, m + shift, work, operation.buffer))
            else:
                port.add_posted(work, operation.buffer)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        while self._sent:
            port, m, work, buffer = self._sent.popleft()
            with locate_errors("sending", port.outgoing.route, m):
                work.wait()
            port.outgoing.release(buffer)
