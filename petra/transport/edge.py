"""Transport over one two-rank communicator for each directed edge: nothing paces one edge by another. For any delay."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from petra.plan.schedule import Step
from petra.specs import Message
from petra.transport.lockstep import Transfer
from petra.transport.packing import Packing
from petra.transport.port import named

_POSTED = 2  # receives posted ahead: one is filled while the stage still works on another


@dataclass
class _Sender:
    packing: Packing
    group: dist.ProcessGroup
    peer: int
    capacity: int
    """Messages that may be under way; the timetable grants d + 1 of them."""
    _pending: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)

    def send(self, message: Message) -> None:
        if len(self._pending) == self.capacity:
            self._wait()
        buffer = self.packing.pack(message)
        self._pending.append((_work(dist.isend(buffer, self.peer, group=self.group)), buffer))

    def finish(self) -> None:
        while self._pending:
            self._wait()

    def _wait(self) -> None:
        work, buffer = self._pending.popleft()
        work.wait()
        self.packing.release(buffer)


@dataclass
class _Receiver:
    packing: Packing
    group: dist.ProcessGroup
    peer: int
    _posted: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    _unposted: int = 0

    def expect(self, messages: int) -> None:
        """Exactly as many receives are posted as messages will come: none is left over when the pipeline is drained."""
        self._unposted = messages
        for _ in range(_POSTED):
            self._post()

    def shorten(self, messages: int) -> None:
        assert self._unposted >= messages, "receives that nothing will answer have been posted"
        self._unposted -= messages

    def receive(self) -> Message:
        work, buffer = self._posted.popleft()
        work.wait()
        self._post()
        return self.packing.unpack(buffer)

    def _post(self) -> None:
        if self._unposted:
            self._unposted -= 1
            buffer = self.packing.buffer()
            self._posted.append((_work(dist.irecv(buffer, self.peer, group=self.group)), buffer))


@dataclass
class EdgePort:
    sender: _Sender
    receiver: _Receiver

    _sent: int = 0

    def send(self, m: int, message: Message) -> None:
        self._sent = m
        with named("sending", self.sender.packing.route, m):
            self.sender.send(message)

    def receive(self, m: int) -> Message:
        with named("receiving", self.receiver.packing.route, m):
            return self.receiver.receive()

    def finish(self) -> None:
        with named("sending", self.sender.packing.route, self._sent):
            self.sender.finish()


class EdgeTransport:
    """The ports of one process.

    Args:
        boundaries: for each boundary between neighbouring processes (rank r, rank r + 1) its forward packing, its backward packing
            and its delay d; the same on every rank.
        line: processes of each replica.
    """

    def __init__(self, boundaries: Sequence[tuple[Packing, Packing, int]], line: int) -> None:
        rank = dist.get_rank()
        self.upstream: EdgePort | None = None
        self.downstream: EdgePort | None = None
        lines = [enumerate(boundaries, start) for start in range(0, dist.get_world_size(), line)]
        for r, (forward, backward, delay) in chain(*lines):
            # Every rank makes every group, in the same order, as torch.distributed asks.
            down, up = (dist.new_group([r, r + 1], timeout=_patience(forward.device)) for _ in range(2))
            if rank in (r, r + 1):
                _warm_up(down, r, r + 1, forward.device)
                _warm_up(up, r + 1, r, forward.device)
            if rank == r:
                self.downstream = EdgePort(_Sender(forward, down, r + 1, delay + 1), _Receiver(backward, up, r + 1))
            if rank == r + 1:
                self.upstream = EdgePort(_Sender(backward, up, r, delay + 1), _Receiver(forward, down, r))

    def begin(self, microbatches: int, backward: bool) -> None:
        """Posts the first receives of a run over ``microbatches``, in which gradients come back or not."""
        if self.upstream:
            self.upstream.receiver.expect(microbatches)
        if self.downstream and backward:
            self.downstream.receiver.expect(microbatches)

    def shorten(self, messages: int) -> None:
        """So many fewer will come than :meth:`begin` has been told, in each direction."""
        for port in (self.upstream, self.downstream):
            if port:
                port.receiver.shorten(messages)

    def transfers(self, steps: Sequence[Step]) -> Sequence[Transfer]:
        """Nothing to do after a round: messages leave when they are sent."""
        return ()

    def exchange(self, transfers: Sequence[Transfer]) -> None:
        """Never needed."""

    def finish(self) -> None:
        """Waits until everything sent has arrived."""
        for port in (self.upstream, self.downstream):
            if port:
                port.finish()


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "only a rank outside the group gets no handle"
    return work


def _patience(device: torch.device) -> timedelta:
    """How long the group of all processes waits for a message; a new group would have torch's own half an hour."""
    timeout: timedelta = _get_default_group()._get_backend(device).options._timeout
    return timeout


def _warm_up(group: dist.ProcessGroup, source: int, target: int, device: torch.device) -> None:
    """Opens the connection now, as it will be used: a first message must not wait for a partner that is busy elsewhere."""
    token = torch.zeros(1, device=device)
    operation, peer = (dist.isend, target) if dist.get_rank() == source else (dist.irecv, source)
    _work(operation(token, peer, group=group)).wait()
