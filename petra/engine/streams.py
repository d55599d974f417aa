"""Steps on several CUDA streams: forward beside backward, and the stages of a round in parallel.

The host launches the steps in the order of the schedule, from one thread. Only the streams differ, so launches of different streams
may run in any order that events don't forbid. The main stream is the one that is current when a round starts:

- The main stream records an event at the start of each round. A step on a stream of its own waits for the event of its round. The
  backward of an overlapping stage waits for the event of the round before, in which the stage's forward ran, and runs beside it.
- The main stream waits for every step on another stream before the host launches anything else on the main stream. Transfers,
  collectives, and the events of later rounds therefore come after it.
- Before an overlapping backward sends, and before its update, its stream waits for the event of its own round. The forward has read
  the weights by then, and the transport has waited for the buffers that the message is packed into.
- The caching allocator reuses memory in the order of the stream that allocated it. :class:`StreamPort` records the streams that use
  a received message. Other memory that is freed on a stream of a stage was allocated on it, or on a stream that waits for it before
  it allocates again.

Autograd differentiates a graph on the stream on which its forward ran. Stages with blocks that store their graph therefore do not
overlap on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from petra.engine.steps import BoundStep, Ports, StepRunner
from petra.plan.schedule import Op
from petra.specs import Message
from petra.transport import Port


class StreamSteps(StepRunner):
    """Runs the steps of a process on a GPU on several CUDA streams.

    Args:
        stages: Stages of this process.
        overlapped: Those whose backward runs beside a forward.
        parallel: Whether stages run in parallel.
        last: Index of the last stage of the pipeline.
        device: The GPU.
    """

    looks_ahead = True

    def __init__(self, stages: Sequence[int], overlapped: Sequence[int], parallel: bool, last: int, device: torch.device) -> None:
        self._last, self._device = last, device
        self._own = {j: torch.cuda.Stream(device) for j in stages} if parallel else {}  # type: ignore[no-untyped-call]
        self._backward = {j: torch.cuda.Stream(device) for j in stages if j in overlapped}  # type: ignore[no-untyped-call]
        self._start: torch.cuda.Event | None = None
        self._beside: set[int] = set()

    def ports(self, ports: Ports) -> Ports:
        """Return ports for messages that cross streams. The ends of the pipeline stay as they are."""
        return {
            j: (up if j == 0 else StreamPort(up, self, j), down if j == self._last else StreamPort(down, self, j))
            for j, (up, down) in ports.items()
        }

    def of_stage(self, stage: int) -> list[torch.cuda.Stream]:
        """Return the streams of a stage besides the main stream."""
        return [streams[stage] for streams in (self._own, self._backward) if stage in streams]

    def wait_for_round(self) -> None:
        """Make the current stream wait for all work of earlier rounds."""
        if self._start is not None:
            torch.cuda.current_stream(self._device).wait_event(self._start)

    def run(self, steps: Sequence[BoundStep], following: Sequence[BoundStep]) -> None:
        """See :meth:`petra.engine.steps.StepRunner.run`."""
        main = torch.cuda.current_stream(self._device)
        before, self._start = self._start, main.record_event()
        for step in steps:
            stage = step.worker.index
            beside = step.op is Op.BACKWARD and stage in self._beside
            stream = self._backward[stage] if beside else self._own.get(stage)
            if stream is None:
                step.run()
                continue
            start = before if beside else self._start
            assert start is not None
            with torch.cuda.stream(stream):
                stream.wait_event(start)
                if beside:
                    step.located(lambda step=step: step.worker.propagate(step.microbatch))  # type: ignore[misc]
                    self.wait_for_round()
                    step.located(step.worker.count_and_update)
                else:
                    step.run()
            main.wait_stream(stream)
            if beside and stage in self._own:
                self._own[stage].wait_stream(stream)
        forwards = {step.worker.index for step in steps if step.op is Op.FORWARD}
        backwards = {step.worker.index for step in following if step.op is Op.BACKWARD}
        self._beside = forwards & backwards & self._backward.keys()


class StreamPort:
    """A port of a stage on several streams; see :class:`petra.transport.Port`."""

    def __init__(self, port: Port, streams: StreamSteps, stage: int) -> None:
        self._port, self._streams = port, streams
        self._users = streams.of_stage(stage)

    def send(self, m: int, message: Message) -> None:
        """Send a message after all work of earlier rounds, which may use the buffer that it is packed into."""
        self._streams.wait_for_round()
        self._port.send(m, message)

    def receive(self, m: int) -> Message:
        """Receive a message, and keep its memory from being reused before the stage's streams have used it."""
        message = self._port.receive(m)
        users = [torch.cuda.current_stream(), *self._users]  # the first and the last backwards run on the main stream
        for tensor in (tensor for part in message for tensor in part):
            for stream in users:
                tensor.record_stream(stream)
        return message
