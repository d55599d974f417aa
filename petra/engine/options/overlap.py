"""Forward beside backward: each in a thread of its own, on the CPU, at the stages of
:func:`petra.plan.timetable.overlapped_stages`."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

from petra.engine.block import BlockRunner, WrappedRunner, without_hooks
from petra.engine.block_function import BlockFunction, WrappedFunction
from petra.engine.executor import ProcessRound, Strategy
from petra.engine.options.threads import compute_threads
from petra.engine.weights import WeightVersion
from petra.engine.worker import Worker
from petra.errors import ModelError, require
from petra.method import Keep
from petra.plan import Plan
from petra.plan.timetable import Op, overlapped_stages
from petra.reversible.replay import NOTHING
from petra.settings import Runtime
from petra.specs import Streams

HOOKS_BESIDE = (
    "activation checkpointing and other saved-tensor hooks inside a block can't be used with trainer.overlap on the CPU if the "
    "block stores its graph or draws random numbers: they could run the block in two threads at once"
)


class Overlapped:
    """Strategy of the executor: runs the backward of a stage beside the forward of the round before. The update comes after both.

    The backward receives its message, computes and sends in the other thread. Forward and backward of a stage share no state that
    one of them changes: the forward evaluates a copy of each block that shares its parameters' memory (:class:`Twin`), messages
    of each direction have their own port, and accumulated gradients belong to the backward.

    Args:
        plan: Plan of the run.
        workers: Workers of this process, by stage. Their blocks' functions are replaced.
        concurrency: Number of threads for backwards.
        others: Strategy that runs all other steps.
    """

    def __init__(self, plan: Plan, workers: Mapping[int, Worker], concurrency: int, others: Strategy) -> None:
        self._stages = frozenset(overlapped_stages(plan.boundary_delays)) & workers.keys()
        self._threads, self._others = compute_threads(concurrency, "backward"), others
        for j in self._stages:
            for runner in workers[j].stage.runners:
                while isinstance(runner, WrappedRunner):
                    runner = runner.inner
                runner.function = Beside(runner)

    def __call__(self, rounds: Iterable[ProcessRound]) -> Iterator[ProcessRound]:
        """Run the steps of rounds, and yield each round after its steps."""
        running: dict[int, Future[None]] = {}
        started: dict[int, Future[None]] = {}
        try:
            for round_, following in pairwise(chain(rounds, [None])):
                assert round_ is not None
                running, started = started, self._start(round_, following)
                for step in round_.steps:
                    if step.op is Op.BACKWARD and (future := running.get(step.worker.index)) is not None:
                        future.result()
                        step.run(step.worker.count_and_update)
                left = [step for step in round_.steps if step.op is Op.FORWARD or step.worker.index not in running]
                deque(self._others([round_._replace(steps=left)]), maxlen=0)
                yield round_
        finally:
            wait([*running.values(), *started.values()])

    def _start(self, round_: ProcessRound, following: ProcessRound | None) -> dict[int, Future[None]]:
        """Start those backwards of the following round that run beside a forward of this one, by stage."""
        if following is None or following.number != round_.number + 1:  # rounds without a step of this process are left out
            return {}
        forwards = {step.worker.index for step in round_.steps if step.op is Op.FORWARD} & self._stages
        backwards = [step for step in following.steps if step.op is Op.BACKWARD and step.worker.index in forwards]
        return {step.worker.index: self._threads.submit(step.run, step.worker.propagate) for step in backwards}


class Beside(WrappedFunction):
    """Function of a block's backward passes, while forward passes that store no graph run in another thread on a :class:`Twin`.

    Args:
        runner: BlockRunner of the block. Each run gives it a new copy of the block for forward passes, in its present mode.
    """

    def __init__(self, runner: BlockRunner) -> None:
        super().__init__(runner.function)
        self._runner, self._keeps_graph = runner, runner.keep is Keep.GRAPH

    def begin_run(self) -> None:
        self.inner.begin_run()
        self._runner.forward_function = self if self._keeps_graph else Twin(self.inner)

    def context(self, x: Tensor, version: WeightVersion | None) -> AbstractContextManager[object]:
        forbidden = self._keeps_graph or self.draws is not False
        return without_hooks(self.module, HOOKS_BESIDE) if forbidden else NOTHING

    def using(self, version: WeightVersion | None) -> AbstractContextManager[None]:
        # A stored graph needs no other values of the parameters, which a forward pass may be reading.
        return NOTHING if self._keeps_graph else self.inner.using(version)


class Twin(WrappedFunction):
    """A copy of a block's function whose parameters share the memory of the block's, and whose buffers are the block's own.

    A forward of the copy reads what an optimizer step has written to the block. Attributes of the two are independent: replacing
    a parameter's ``data`` or disabling the updates of running statistics in one of them does not affect the other.

    Raises:
        ModelError: If the block can't be copied.
    """

    def __init__(self, function: BlockFunction) -> None:
        super().__init__(_copied(function))
        self._function = function

    def __call__(self, m: int, x: Streams, version: WeightVersion | None) -> Streams:
        y = self.inner(m, x, version)
        self._function.set_draws(self.draws)
        return y


def _copied(function: BlockFunction) -> BlockFunction:
    module = function.module
    memo: dict[int, object] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    memo |= {id(buffer): buffer for buffer in module.buffers()}
    try:
        return copy.deepcopy(function, memo)
    except Exception as error:
        raise ModelError(
            f"trainer.overlap: {type(module).__name__} can't be copied for forwards beside backwards: {error}"
        ) from error


def check_overlap(plan: Plan, runtime: Runtime, device: torch.device) -> None:
    """Check that forward can run beside backward.

    Raises:
        ConfigError: If not.
    """
    require(device.type == "cpu", "trainer.overlap", "false on a GPU", True)
    got = f"true with delays {list(plan.boundary_delays)}" if plan.boundary_delays else "true with one stage"
    expected = "false unless a boundary between stages has a delay d >= 2"
    require(bool(overlapped_stages(plan.boundary_delays)), "trainer.overlap", expected, got)
    require(not plan.refetches, "data.refetch", "false with trainer.overlap", True)
    require(not plan.numerics.exact_streams, "trainer.exact_streams", "false with trainer.overlap", True)
    require(runtime.compile is None, "trainer.compile", "null with trainer.overlap", runtime.compile)


def describe_overlap(boundary_delays: Sequence[int]) -> str:
    """Return which stages run forward beside backward, in one line; the last stage never does."""
    stages, count = overlapped_stages(boundary_delays), len(boundary_delays) + 1
    contiguous = len(stages) > 1 and stages == tuple(range(stages[0], stages[-1] + 1))
    numbers = f"{stages[0] + 1}–{stages[-1] + 1}" if contiguous else ", ".join(str(j + 1) for j in stages)
    return f"forward beside backward at stages {numbers} of {count}" if stages else f"no stage of {count} overlaps"
