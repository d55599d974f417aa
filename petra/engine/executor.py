"""One process's walk through the timetable: its stages' steps round by round, and messages to its neighbours in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from petra.engine.early_stop import EarlyEnd
from petra.engine.worker import Worker
from petra.errors import ConfigError, PetraError
from petra.plan.rounds import Orders, periodic_rounds
from petra.plan.schedule import Op, Step, evaluation_order, training_orders
from petra.transport import Transfer, Transport

Do = Callable[[Worker, Op, int], None]
Part = tuple[list[tuple[Worker, Op, int]], Sequence[Transfer], int | None]
"""Of a round: this process's steps, its share in an exchange, and the microbatch that all stages have done with it."""


class Engine:
    """Runs the stages of one process in step with those of all others.

    Args:
        workers: of this process's stages.
        transport: to the other processes of the line, if there are any.
        delays: τ of every stage of the line.
        boundary_delays: d of every boundary.
        flush_every: microbatches after which the pipeline drains; None for never.
        processes: that end a stretch together when one of them is asked to.
        paced: some process has no stage, and must not wait at the end for so long that it gives the others up.
        threads: in which the stages of a round run at the same time; None runs them in turn.
        flops: of a forward of each stage.
        on_completed: called with each microbatch that every stage has done, at a moment when no message is under way.
    """

    def __init__(
        self,
        workers: Mapping[int, Worker],
        transport: Transport | None,
        delays: Sequence[int],
        boundary_delays: Sequence[int],
        flush_every: int | None,
        *,
        processes: int,
        paced: bool,
        threads: ThreadPoolExecutor | None,
        flops: Sequence[int],
        on_completed: Callable[[int], None] | None,
    ) -> None:
        self._workers, self._transport, self._threads = workers, transport, threads
        self._delays, self._boundary_delays, self._flush_every = delays, boundary_delays, flush_every
        self._processes, self._paced, self._flops, self._on_completed = processes, paced, flops, on_completed
        self._whole = True

    def train(self, start: int, end: int, stop: Callable[[], bool] | None = None) -> int:
        """F, B and updates of microbatches start … end − 1, then the drain; how many were done if ``stop`` said yes before."""

        def orders(start: int, end: int) -> Sequence[Iterable[tuple[Op, int]]]:
            return training_orders(self._delays, start, end, self._flush_every)

        return self._run(orders, start, end, Worker.do, backward=True, stop=stop)

    def evaluate(self, microbatches: int) -> None:
        """Forwards of microbatches 0 … ``microbatches`` − 1."""

        def orders(start: int, end: int) -> Sequence[Iterable[tuple[Op, int]]]:
            return [evaluation_order(start, end) for _ in self._delays]

        self._run(orders, 0, microbatches, lambda worker, _, m: worker.evaluate(m), backward=False)

    def _run(self, orders: Orders, start: int, end: int, do: Do, *, backward: bool, stop: Callable[[], bool] | None = None) -> int:
        if not self._whole:
            raise PetraError(
                "pipeline: found one whose last call ended in an error, with messages on their way, accepted is a new one"
            )
        self._whole = False
        warm_up = 2 * max(self._delays) + len(self._delays)
        timed = periodic_rounds(orders, self._boundary_delays, start, end, period=self._flush_every or 1, fill=warm_up)
        transport = self._transport
        if transport is not None:
            transport.begin(end - start, backward)
        early = None
        if stop is None and self._paced:
            stop = _never
        if stop is not None:
            shorten = transport.shorten if transport is not None else lambda messages: None
            early = EarlyEnd(stop, self._processes, lambda bodies: shorten(bodies * timed.period))
        mine = timed.map(self._part)
        for shift, (steps, transfers, completed) in mine if early is None else mine.iterate(early):
            if self._threads is None:
                for worker, op, m in steps:
                    do(worker, op, m + shift)
            else:  # steps of one round don't depend on each other
                started = [self._threads.submit(do, worker, op, m + shift) for worker, op, m in steps]
                for future in started:
                    future.result()
            if transport is not None and transfers:
                transport.exchange(transfers)
            if self._on_completed is not None and completed is not None:
                self._on_completed(completed + shift)
        if transport is not None:
            transport.finish()
        self._whole = True
        if early is None:
            return end - start
        early.finish()
        return end - start - early.dropped * timed.period

    def _part(self, round_: Sequence[Step]) -> Part:
        mine = [step for step in round_ if step.stage in self._workers]
        if self._threads is not None:
            mine.sort(key=self._cost, reverse=True)
        steps = [(self._workers[step.stage], step.op, step.microbatch) for step in mine]
        completed = next((step.microbatch for step in round_ if step.stage == 0 and step.op is Op.BACKWARD), None)
        return steps, self._transport.transfers(round_) if self._transport is not None else (), completed

    def _cost(self, step: Step) -> int:
        """Of a step, in FLOPs: the longest of a round start first, so that threads end together."""
        return self._flops[step.stage] * (1 if step.op is Op.FORWARD else 3)


def _never() -> bool:
    return False


def stage_threads(concurrency: int, processes: int, device: torch.device) -> ThreadPoolExecutor | None:
    """Threads for so many stages at the same time, each with torch's number of threads; None for one.

    Raises:
        ConfigError: stages of a GPU, or of one among several processes.
    """
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ConfigError(f"concurrency: found {concurrency}, accepted are integers >= 1")
    if concurrency == 1:
        return None
    if processes > 1 or device.type != "cpu":
        found = f"{processes} process(es) on {device.type}"
        raise ConfigError(f"concurrency: found {concurrency} with {found}, accepted is 1 but for one process on the CPU")
    return ThreadPoolExecutor(concurrency, "stage", torch.set_num_threads, (torch.get_num_threads(),))
