"""Transport in lockstep: after each round one grouped exchange with both neighbours, in the same order on every rank.

A grouped exchange can't deadlock. At d = 2 all stages forward in the same rounds, and what an exchange brings is needed a round
later: communication hides behind the other half of the tick.
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
from petra.transport.port import named


@dataclass
class LockstepPort:
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
        with named("receiving", self.incoming.route, m):
            work.wait()
        return self.incoming.unpack(buffer)


class Transfer(NamedTuple):
    """A message that leaves or arrives in an exchange."""

    port: LockstepPort
    sends: bool

    def operation(self) -> dist.P2POp:
        port = self.port
        if self.sends:
            return dist.P2POp(dist.isend, port._outbox.popleft(), port.peer, port.group)
        return dist.P2POp(dist.irecv, port.incoming.buffer(), port.peer, port.group)


class LockstepTransport:
    """The ports of one process, whose messages travel in :meth:`exchange`.

    Args:
        boundaries: for each boundary between neighbouring processes (rank r, rank r + 1) its forward packing, its backward packing
            and its delay d.
        stages: for each rank its stages.
        group: of this replica's processes; None if all are.
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
        # Batched point-to-point as a group's first call must be joined by every rank; a barrier opens it for all.
        gpu = [forward.device.index for forward, _, _ in boundaries[:1] if forward.device.type == "cuda"]
        dist.barrier(group, device_ids=gpu or None)

    def begin(self, microbatches: int, backward: bool) -> None:
        """Nothing is posted ahead."""

    def shorten(self, messages: int) -> None:
        """As nothing is, there is nothing to take back."""

    def transfers(self, steps: Sequence[Step]) -> Sequence[Transfer]:
        """This process's share in the exchange of what all stages produced in one round, in the same order on every rank."""
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
        """One grouped exchange with both neighbours."""
        operations = [transfer.operation() for transfer in transfers]
        port = transfers[0].port
        with named("exchanging", f"{port.outgoing.route} and back", port.sent):
            works = dist.batch_isend_irecv(operations)
        self.finish()  # of what the exchange before this one sent
        for i, ((port, sends), operation) in enumerate(zip(transfers, operations, strict=True)):
            # NCCL answers with one handle for the whole group, gloo with one for each operation.
            work = works[min(i, len(works) - 1)]
            if sends:
                self._sent.append((port, work, operation.tensor))
            else:
                port._inbox.append((work, operation.tensor))

    def finish(self) -> None:
        """Waits until everything sent has arrived."""
        while self._sent:
            port, work, buffer = self._sent.popleft()
            with named("sending", port.outgoing.route, port.sent):
                work.wait()
            port.outgoing.release(buffer)
