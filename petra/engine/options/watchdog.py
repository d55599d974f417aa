"""Watchdog of a run: a thread that reports where this process waits when a round takes too long."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping
from math import inf
from pathlib import Path
from traceback import walk_stack

from petra.engine.options.rounds import unfinished
from petra.engine.worker import Worker
from petra.hooks import Hook

SLOWER = 10
"""Factor by which a round must exceed the slowest one before it."""
COMPILERS = "torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py"
"""Files whose functions run while ``torch.compile`` compiles."""
PETRA = f"{Path(__file__).parents[2]}/"
log = logging.getLogger(__name__)


class Watchdog(Hook):
    """Log a warning about a round that takes longer than ``seconds`` and :data:`SLOWER` times the slowest one before it.

    A round that has taken half of ``timeout`` is reported in any case, since the process group may end the run soon after.

    It names rank, stage, microbatch, pass and round, the code that waits, and the microbatches that a GPU has not finished. The run
    goes on: the timeout of the process group ends it. A round begins with a step of the process's first stage. Only
    ``Pipeline.train`` is watched, so not the writing of a checkpoint, and no round in which blocks compile.

    Args:
        workers: Workers of this process, by stage.
        rank: Rank of this process.
        seconds: Shortest duration of a round that is reported.
        quiet: Number of rounds at the start of each training run that may take any time up to half of ``timeout``.
        timeout: Seconds that a process waits for another before the run ends with an error.
    """

    def __init__(
        self, workers: Mapping[int, Worker], rank: int, seconds: float = 60.0, *, quiet: int = 1, timeout: float = inf
    ) -> None:
        self.seconds, self._workers, self._rank, self._quiet, self._longest = seconds, workers, rank, quiet, timeout / 2
        self._first, self._step = min(workers, default=-1), (0, 0, 0)
        self._round, self._began, self._slowest, self._ended = 0, 0.0, 0.0, threading.Event()

    def train_begin(self, start: int, stop: int) -> None:
        self._round, self._ended = 0, threading.Event()
        threading.Thread(target=self._watch, args=(threading.get_ident(), self._ended), name="watchdog", daemon=True).start()

    def train_end(self) -> None:
        self._ended.set()

    def receive_begin(self, stage: int, peer: int, m: int) -> None:
        self._step = stage, peer, m
        if stage == self._first:
            now = time.monotonic()
            if self._round > self._quiet:
                self._slowest = max(self._slowest, now - self._began)
            self._round, self._began = self._round + 1, now

    def _watch(self, trainer: int, ended: threading.Event) -> None:
        """Watch a training run of the thread ``trainer`` until it ends, with or without an error."""
        reported = 0
        while not ended.wait(min(self.seconds / 4, 5.0)):
            number, elapsed = self._round, time.monotonic() - self._began
            stacks = {
                thread: [f"{f.f_code.co_filename}:{line} {f.f_code.co_name}" for f, line in walk_stack(frame)]
                for thread, frame in sys._current_frames().items()
            }
            inside = [call for call in stacks.get(trainer, []) if call.startswith(PETRA)]
            if any(file in call for stack in stacks.values() for call in stack for file in COMPILERS):
                self._began = time.monotonic()
            elif not any(call.endswith(" train") for call in inside):
                return
            elif number > reported and elapsed > self._limit(number):
                reported = number
                calls = dict.fromkeys((inside[0].removeprefix(PETRA), stacks[trainer][0].removeprefix(PETRA)))
                log.warning(self._text(number, elapsed, ", which called ".join(calls)))

    def _limit(self, number: int) -> float:
        """Return the seconds after which a round is reported."""
        usual = inf if number <= self._quiet else max(self.seconds, SLOWER * self._slowest)
        return min(usual, self._longest)

    def _text(self, number: int, elapsed: float, where: str) -> str:
        (stage, peer, m), running = self._step, unfinished(self._workers[self._first].upstream)
        step = f"stage {stage + 1}, microbatch {m}, {'forward' if peer < stage else 'backward'}, round {number}"
        device = f"; the GPU has not finished microbatches {', '.join(map(str, running))}" if running else ""
        times = f"{elapsed:.1f} s without progress, {self._slowest:.2g} s in the slowest round before"
        return f"rank {self._rank}, {step}: {times}; waits in petra/{where}{device}"
