"""Transport with a two-rank communicator for each edge, that is, each direction of each boundary. Edges do not wait for each other,
so it works for any delay.

On GPUs, a receive is posted only when its message is due, because a posted NCCL receive occupies the device. Sends occupy it too,
so there is no proof that a run on GPUs cannot hang (:func:`petra.plan.transport.choose_transport`)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from petra.specs import Message
from petra.torch_private import default_group_timeout
from petra.transport.packing import Packing
from petra.transport.port import Transport, locate_errors


def posted_receives(delay: int) -> int:
    """Return how many receives are posted in advance on each edge of a boundary between CPUs, given the boundary's delay d.

    At most d + 1 messages wait at a boundary. With as many receives, the sender knows of a receive before it sends, so that no
    message pays the latency twice. With at least two, one is filled while the stage still works on another.
    """
    return max(2, delay + 1)


@dataclass
class EdgePort:
    """A port whose neighbour is in another process; see :class:`petra.transport.Port`.

    At most d + 1 sends are pending; the timetable needs as many. On CPUs, receives are posted in advance.

    Attributes:
        outgoing, incoming: Packing of the messages in each direction.
        sends, receives: Group of both ranks for each direction.
        peer: Rank of the neighbour.
        delay: Delay d of the boundary.
    """

    outgoing: Packing
    incoming: Packing
    sends: dist.ProcessGroup
    receives: dist.ProcessGroup
    peer: int
    delay: int
    _sent: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    _posted: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    _unposted: int = 0
    _last: int = 0

    def send(self, m: int, message: Message) -> None:
        self._last = m
        with locate_errors("sending", self.outgoing.route, m):
            if len(self._sent) > self.delay:
                self._wait()
            buffer = self.outgoing.pack(message)
            self._sent.append((_work(dist.isend(buffer, self.peer, group=self.sends)), buffer))

    def receive(self, m: int) -> Message:
        with locate_errors("receiving", self.incoming.route, m):
            if not self._posted:
                self._post()
            work, buffer = self._posted.popleft()
            work.wait()
            if self._ahead:
                self._post()
            return self.incoming.unpack(buffer)

    def expect(self, messages: int) -> None:
        """Post the first receives of a run with ``messages`` messages. No receive is left when the pipeline has drained."""
        self._unposted = messages
        for _ in range(self._ahead):
            self._post()

    def shorten(self, messages: int) -> None:
        """Expect ``messages`` fewer."""
        assert self._unposted >= messages, "receives without a matching send have been posted"
        self._unposted -= messages

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        with locate_errors("sending", self.outgoing.route, self._last):
            while self._sent:
                self._wait()

    @property
    def _ahead(self) -> int:
        """Number of receives to post before their messages are due."""
        return posted_receives(self.delay) if self.incoming.device.type == "cpu" else 0

    def _post(self) -> None:
        if self._unposted:
            self._unposted -= 1
            buffer = self.incoming.buffer()
            self._posted.append((_work(dist.irecv(buffer, self.peer, group=self.receives)), buffer))

    def _wait(self) -> None:
        work, buffer = self._sent.popleft()
        work.wait()
        self.outgoing.release(buffer)


class EdgeTransport(Transport):
    """The ports of one rank.

    Args:
        boundaries: Forward packing, backward packing and delay d of each boundary between neighbouring processes of a replica, the
            same on every rank.
        processes: Number of processes of each replica.
        stride: Distance of the ranks of neighbouring processes.
    """

    upstream: EdgePort | None = None
    downstream: EdgePort | None = None

    def __init__(self, boundaries: Sequence[tuple[Packing, Packing, int]], processes: int, stride: int = 1) -> None:
        # torch would warn once for each communicator that its operations are not grouped, which is the purpose of this transport.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        rank = dist.get_rank()
        starts = [i + t for i in range(0, dist.get_world_size(), processes * stride) for t in range(stride)]
        for start, (p, (forward, backward, delay)) in product(starts, enumerate(boundaries)):
            r, peer = start + p * stride, start + (p + 1) * stride
            # torch.distributed requires every rank to create every group, in the same order.
            down, up = (dist.new_group([r, peer], timeout=default_group_timeout(forward.device)) for _ in range(2))
            if rank in (r, peer):
                _warm_up(down, r, peer, forward.device)
                _warm_up(up, peer, r, forward.device)
            if rank == r:
                self.downstream = EdgePort(forward, backward, down, up, peer, delay)
            if rank == peer:
                self.upstream = EdgePort(backward, forward, up, down, r, delay)

    def begin(self, microbatches: int, backward: bool) -> None:
        """Post the first receives of a run over ``microbatches``, with or without backward messages."""
        if self.upstream:
            self.upstream.expect(microbatches)
        if self.downstream and backward:
            self.downstream.expect(microbatches)

    def shorten(self, messages: int) -> None:
        """Expect ``messages`` fewer than :meth:`begin` announced, in each direction."""
        for port in (self.upstream, self.downstream):
            if port:
                port.shorten(messages)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for port in (self.upstream, self.downstream):
            if port:
                port.finish()


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "only a rank outside the group gets no handle"
    return work


def _warm_up(group: dist.ProcessGroup, source: int, target: int, device: torch.device) -> None:
    """Open the connection, so that the first message of a run does not wait for a peer that is busy with another edge."""
    token = torch.zeros(1, device=device)
    operation, peer = (dist.isend, target) if dist.get_rank() == source else (dist.irecv, source)
    _work(operation(token, peer, group=group)).wait()
