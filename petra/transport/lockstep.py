"""Transport in lockstep: after each round one grouped exchange with both neighbours, in the same order on every rank.

A grouped exchange can't deadlock. At d = 2 all stages forward in the same rounds, and what an exchange brings is needed a round
later: communication hides behind the other half of the tick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from petra.schedule import Op, Step
from petra.streams import Message
from petra.transport.packing import Packing


@dataclass
class LockstepPort:
    outgoing: Packing
    incoming: Packing
    peer: int
    _outbox: deque[Tensor] = field(default_factory=deque)
    _inbox: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)

    def send(self, m: int, message: Message) -> None:
        self._outbox.append(self.outgoing.pack(message))

    def receive(self, m: int) -> Message:
        work, buffer = self._inbox.popleft()
        work.wait()
        return self.incoming.unpack(buffer)


class LockstepTransport:
    """The ports of one process, whose messages travel in :meth:`exchange`.

    Args:
        boundaries: for each boundary between neighbouring processes (rank r, rank r + 1) its forward packing, its backward packing
            and its delay d.
        stages: for each rank its stages.
    """

    def __init__(self, boundaries: Sequence[tuple[Packing, Packing, int]], stages: Sequence[range]) -> None:
        rank = dist.get_rank()
        self.upstream: LockstepPort | None = None
        self.downstream: LockstepPort | None = None
        if 0 < rank <= len(boundaries):
            forward, backward, _ = boundaries[rank - 1]
            self.upstream = LockstepPort(outgoing=backward, incoming=forward, peer=rank - 1)
        if rank < len(boundaries):
            forward, backward, _ = boundaries[rank]
            self.downstream = LockstepPort(outgoing=forward, incoming=backward, peer=rank + 1)
        self._stages = stages[rank]
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        # Batched point-to-point as a group's first call must be joined by every rank; a barrier opens it for all.
        gpu = [forward.device.index for forward, _, _ in boundaries[:1] if forward.device.type == "cuda"]
        dist.barrier(device_ids=gpu or None)

    def begin(self, microbatches: int, ops: Sequence[Op]) -> None:
        """Nothing is posted ahead."""

    def exchange(self, steps: Sequence[Step]) -> None:
        """Exchanges what all stages produced in one round."""
        transfers: list[tuple[LockstepPort, dist.P2POp]] = []
        for step in steps:
            transfer = self._transfer(step)
            if transfer is not None:
                transfers.append(transfer)
        if not transfers:
            return
        works = dist.batch_isend_irecv([operation for _, operation in transfers])
        self.finish()  # of what the exchange before this one sent
        for i, (port, operation) in enumerate(transfers):
            # NCCL answers with one handle for the whole group, gloo with one for each operation.
            handle = (works[min(i, len(works) - 1)], operation.tensor)
            (self._sent if operation.op is dist.isend else port._inbox).append(handle)

    def finish(self) -> None:
        """Waits until everything sent has arrived."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _transfer(self, step: Step) -> tuple[LockstepPort, dist.P2POp] | None:
        """This process's part in sending what ``step`` produced, if it has one."""
        mine = self._stages
        if not mine:
            return None
        if step.op is Op.FORWARD and self.downstream and step.stage == mine[-1]:
            return self.downstream, dist.P2POp(dist.isend, self.downstream._outbox.popleft(), self.downstream.peer)
        if step.op is Op.FORWARD and self.upstream and step.stage == mine[0] - 1:
            return self.upstream, dist.P2POp(dist.irecv, self.upstream.incoming.buffer(), self.upstream.peer)
        if step.op is Op.BACKWARD and self.upstream and step.stage == mine[0]:
            return self.upstream, dist.P2POp(dist.isend, self.upstream._outbox.popleft(), self.upstream.peer)
        if step.op is Op.BACKWARD and self.downstream and step.stage == mine[-1] + 1:
            return self.downstream, dist.P2POp(dist.irecv, self.downstream.incoming.buffer(), self.downstream.peer)
        return None
