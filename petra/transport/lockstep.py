"""Transport with one grouped exchange with both neighbours after each round, in the same order on every rank.

A grouped exchange cannot deadlock. At d = 2 all stages forward in the same rounds and need what an exchange brings one round later,
so communication overlaps the other half of the tick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from petra.plan.schedule import Op, Step
from petra.specs import Message
from petra.transport.packing import Packing
from petra.transport.port import locate_errors


@dataclass
class LockstepPort:
    """A port whose neighbour is in another process; see :class:`petra.transport.Port`."""

    outgoing: Packing
    incoming: Packing
    peer: int
    group: dist.ProcessGroup | None
    _outbox: deque[Tensor] = field(default_factory=deque)
    _inbox: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)

    sent: int = 0

    def send(self, m: int, message: Message) -> None:
        self.sent = m
        self._outbox.append(self.outgoing.pack(message))

    def receive(self, m: int) -> Message:
        work, buffer = self._inbox.popleft()
        with locate_errors("receiving", self.incoming.route, m):
            work.wait()
        return self.incoming.unpack(buffer)

    def send_operation(self) -> dist.P2POp:
        """Return the operation that sends the oldest message handed over."""
        return dist.P2POp(dist.isend, self._outbox.popleft(), self.peer, self.group)

    def receive_operation(self) -> dist.P2POp:
        """Return an operation that receives a message."""
        return dist.P2POp(dist.irecv, self.incoming.buffer(), self.peer, self.group)

    def arriving(self, work: dist.Work, buffer: Tensor) -> None:
        """Take note of a posted receive."""
        self._inbox.append((work, buffer))


class Transfer(NamedTuple):
    """A message that is sent or received in an exchange."""

    port: LockstepPort
    sends: bool

    def operation(self) -> dist.P2POp:
        """Return the operation of torch.distributed for this transfer."""
        return self.port.send_operation() if self.sends else self.port.receive_operation()


class LockstepTransport:
    """The ports of one rank, whose messages travel in :meth:`exchange`.

    Args:
        boundaries: Forward packing, backward packing and delay d of each boundary between neighbouring processes of a replica.
        stages: Stages of each process of a replica.
        group: Ranks of this replica; None if there is only one replica.
    """

    def __init__(
        self,
        boundaries: Sequence[tuple[Packing, Packing, int]],
        stages: Sequence[range],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        rank = dist.get_rank()
        place = rank % len(stages)
        self.upstream: LockstepPort | None = None
        self.downstream: LockstepPort | None = None
        if 0 < place <= len(boundaries):
            forward, backward, _ = boundaries[place - 1]
            self.upstream = LockstepPort(outgoing=backward, incoming=forward, peer=rank - 1, group=group)
        if place < len(boundaries):
            forward, backward, _ = boundaries[place]
            self.downstream = LockstepPort(outgoing=forward, incoming=backward, peer=rank + 1, group=group)
        self._stages = stages[place]
        self._sent: deque[tuple[LockstepPort, dist.Work, Tensor]] = deque()
        # If batched point-to-point is the first call of a group, every rank must take part. A barrier opens the group instead.
        gpu = [forward.device.index for forward, _, _ in boundaries[:1] if forward.device.type == "cuda"]
        dist.barrier(group, device_ids=gpu or None)

    def begin(self, microbatches: int, backward: bool) -> None:
        """Do nothing: no receive is posted ahead."""

    def shorten(self, messages: int) -> None:
        """Do nothing: no receive was posted ahead."""

    def transfers(self, steps: Sequence[Step]) -> Sequence[Transfer]:
        """Return what this rank sends and receives after a round with these ``steps``, in the same order on every rank."""
        found: list[Transfer] = []
        mine = self._stages
        for stage, op in ((step.stage, step.op) for step in steps if mine):
            if self.downstream and op is Op.FORWARD and stage == mine[-1]:
                found.append(Transfer(self.downstream, sends=True))
            elif self.upstream and op is Op.FORWARD and stage == mine[0] - 1:
                found.append(Transfer(self.upstream, sends=False))
            elif self.upstream and op is Op.BACKWARD and stage == mine[0]:
                found.append(Transfer(self.upstream, sends=True))
            elif self.downstream and op is Op.BACKWARD and stage == mine[-1] + 1:
                found.append(Transfer(self.downstream, sends=False))
        return found

    def exchange(self, transfers: Sequence[Transfer]) -> None:
        """Post one grouped exchange with both neighbours."""
        operations = [transfer.operation() for transfer in transfers]
        port = transfers[0].port
        with locate_errors("exchanging", f"{port.outgoing.route} and back", port.sent):
            works = dist.batch_isend_irecv(operations)
        self.finish()  # wait for what the previous exchange sent
        for i, ((port, sends), operation) in enumerate(zip(transfers, operations, strict=True)):
            # NCCL returns one handle for the whole group, gloo one for each operation.
            work = works[min(i, len(works) - 1)]
            if sends:
                self._sent.append((port, work, operation.tensor))
            else:
                port.arriving(work, operation.tensor)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        while self._sent:
            port, work, buffer = self._sent.popleft()
            with locate_errors("sending", port.outgoing.route, port.sent):
                work.wait()
            port.outgoing.release(buffer)
