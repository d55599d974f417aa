"""Memory that a GPU's allocator will reach, per process and per stage, predicted by running the engine on tensors without data.

The prediction runs the code of a training run: stages, optimizer, messages and schedule of one process, in torch's FakeTensorMode.
Every allocation and release is counted in the order in which they happen, so the peak includes what exists for a moment only.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from petra.cost_model.block_memory import Known, Repeated
from petra.diagnostics.activation_memory import CPU, LiveBytes, fake_module, rounded
from petra.engine.block import WrappedRunner
from petra.engine.build import build_stages, build_workers
from petra.engine.endpoints import DataPort, LossPort
from petra.engine.executor import Executor
from petra.engine.options.averaging import WeightAverage
from petra.engine.options.finite_check import Settle
from petra.engine.recipe import Recipe
from petra.engine.update import Norm, Step, Update
from petra.engine.worker import Worker
from petra.hooks import Hook, Hooks
from petra.method import Weights
from petra.plan import Plan
from petra.plan.timetable import training_rounds
from petra.settings import Runtime
from petra.specs import Message, Streams, TensorSpec
from petra.torch_private import fake_tensor_mode, storage_key
from petra.transport import LockstepTransport, connect, pack_boundaries

UNDECIDED = (Norm, Step, WeightAverage, Settle)
"""Parts of an update that read no values."""
WORKSPACE = 32 * 2**20
"""Allowance for workspaces of cuBLAS, in bytes: the default on Hopper GPUs. Those of cuDNN depend on its choice of algorithms."""


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes of one process at the peak of training, or the part of one of its stages.

    Attributes:
        weights: Parameters and buffers.
        gradients: Accumulated gradients.
        optimizer: States of the optimizer, and moving averages.
        stored: What else exists when a forward ends, at the time when the process has most of it: stored activations, stashed
            weights, and messages that have arrived or are being sent.
        temporary: What the step that needs most adds for a moment: the graph of a backward, and its gradients.
        workspace: Allowance for workspaces of libraries; 0 for a stage.
        stages: The stages of the process by index; empty for a stage. A message counts for the stage that received it last.
    """

    weights: int
    gradients: int
    optimizer: int
    stored: int
    temporary: int
    workspace: int = WORKSPACE
    stages: Mapping[int, PredictedMemory] = field(default_factory=dict)

    @property
    def between(self) -> int:
        """Bytes that exist when a forward ends."""
        return self.weights + self.gradients + self.optimizer + self.stored

    @property
    def tensors(self) -> int:
        """Peak of torch's allocator without workspaces."""
        return self.between + self.temporary

    @property
    def total(self) -> int:
        """Peak with workspaces. The CUDA context and NCCL's buffers, which are not torch's, come on top."""
        return self.tensors + self.workspace


def _states(update: Update) -> list[Tensor]:
    """Return the tensors of the optimizer, and moving averages."""
    average = update.part(WeightAverage)
    states = [] if update.optimizer is None else [t for state in update.optimizer.state.values() for t in state.values()]
    return [*(average.values if average else ()), *(t for t in states if isinstance(t, Tensor))]


class _Blank:
    """Microbatches without data."""

    def __init__(self, inputs: TensorSpec, targets: TensorSpec) -> None:
        self._inputs, self._targets = inputs, targets

    def inputs(self, m: int) -> Tensor:
        return torch.empty(self._inputs.shape, dtype=self._inputs.dtype)

    def refetch(self, m: int) -> Tensor:
        return self.inputs(m)

    def targets(self, m: int) -> Tensor:
        return torch.empty(self._targets.shape, dtype=self._targets.dtype)


class _Watch(Hook):
    """Records the bytes that live when forwards end, which stage they belong to, and what each forward stores."""

    def __init__(self, live: LiveBytes) -> None:
        self._live, self.between, self.own_between = live, 0, Counter[int]()
        self.stored: list[int] = []
        self._before, self._forward = 0, False

    def receive_begin(self, stage: int, peer: int, m: int) -> None:
        self._finish_forward()
        self._live.owner = stage

    def receive_end(self, stage: int, peer: int, m: int, message: Message) -> None:
        tensors = [t for part in message for t in part]
        self._live.assign(tensors, stage)
        self._before = self._live.now - _bytes(tensors)

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        self._forward = True
        if self._live.now > self.between:
            self.between, self.own_between = self._live.now, self._live.own.copy()

    def exchange_begin(self, stage: int) -> None:
        self._finish_forward()

    def _finish_forward(self) -> None:
        if self._forward:
            self.stored.append(self._live.now - self._before)
            self._forward = False


class _Done:
    """Handle of an operation that has ended."""

    def wait(self) -> None:
        return


def predict_memory(
    plan: Plan, recipe: Recipe, targets: TensorSpec, *, process: int = 0, known: Known | None = None
) -> PredictedMemory:
    """Predict the memory of one process, and of each of its stages; see :func:`account`."""
    return account(plan, recipe, targets, process=process, known=known)[0]


def account(
    plan: Plan, recipe: Recipe, targets: TensorSpec, *, process: int = 0, known: Known | None = None
) -> tuple[PredictedMemory, list[int]]:
    """Count the memory of one process, and of each of its stages. Needs neither a GPU nor the memory that it counts.

    Args:
        plan: Plan of the run. Between processes, the lockstep transport is assumed.
        recipe: Training settings. Their functions are called with tensors without data.
        targets: Shape and type of a microbatch's targets (of a replica's share).
        process: Process of the pipeline, from 0.
        known: Passes of blocks that have been counted. They run once for each kind of block, and are added here. Plans with the
            same model, inputs and number formats may share it. None runs every pass.

    Returns:
        The memory, and the bytes that each forward has stored, or allocated to send its output.

    Raises:
        PetraError: If this torch has no FakeTensorMode.
    """
    hooks, live = Hooks(), LiveBytes()
    with torch.device("meta"):
        blocks = {b: plan.model.blocks[b].build().train() for j in plan.layout.processes[process] for b in plan.stages[j].blocks}
    with fake_tensor_mode(), live:
        data = _Blank(plan.layout.inputs, targets)
        channels_last = plan.numerics.channels_last
        live.owner = min(plan.layout.processes[process], default=0)
        executor, workers = _executor(plan, recipe, data, process, hooks, lambda b: _without_data(blocks[b], channels_last))
        if known is not None:
            for worker in workers:
                for b, runner in zip(plan.stages[worker.index].blocks, worker.stage.runners, strict=True):
                    inner = runner.inner if isinstance(runner, WrappedRunner) else runner
                    inner.function = inner.forward_function = Repeated(inner.function, plan.model.blocks[b].kind, live, known)
        for worker in workers:
            live.assign(chain(*_tensors(worker)), worker.index)
        watch = _Watch(live)
        hooks.attach(watch)
        executor.train(0, _enough(plan, process))
        fixed = {worker.index: [_bytes(tensors) for tensors in _tensors(worker)] for worker in workers}
    temporary = {j: max(live.peaks[j] - watch.between, 0) for j in fixed}
    stages = {j: _predicted(sizes, watch.own_between[j], temporary[j], workspace=0) for j, sizes in fixed.items()}
    together = [sum(parts) for parts in zip(*fixed.values(), strict=True)] or [0, 0, 0]
    return (_predicted(together, watch.between, max(temporary.values(), default=0), stages=stages), watch.stored)


def _enough(plan: Plan, process: int) -> int:
    """Return a number of microbatches after which a process has had all that it ever has at the same time.

    The first update creates the states of the optimizer. The drain at the end counts too: it may need more buffers for messages.
    """
    if plan.method.flush:
        return 2 * plan.k
    owned = plan.layout.processes[process]
    stages = [plan.stages[j] for j in owned]
    filled = max((stage.delay for stage in stages), default=0)
    updates = 2
    if any(stage.weights is not Weights.CURRENT for stage in stages):  # the first microbatches in flight share a version
        updates = max(updates, 1 + -(-filled // plan.k))
    if len({*plan.boundary_delays}) > 1:  # earlier stages get ahead until messages wait wherever there is room
        rounds = training_rounds(plan.delays, plan.boundary_delays, 0, sys.maxsize)
        filled = max(filled, *(step.microbatch for steps in rounds.until_steady() for step in steps if step.stage in owned))
    return filled + updates * plan.k + 1


def _predicted(fixed: Sequence[int], between: int, temporary: int, **options: Any) -> PredictedMemory:
    weights, gradients, optimizer = fixed
    return PredictedMemory(weights, gradients, optimizer, between - sum(fixed), temporary, **options)


def _tensors(worker: Worker) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return weights and buffers, gradients, and states of the optimizer of a stage."""
    module = worker.stage.module
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [*module.parameters(), *module.buffers()], gradients, _states(worker.update)


def _executor(
    plan: Plan, recipe: Recipe, data: _Blank, process: int, hooks: Hooks, blocks: Callable[[int], nn.Module]
) -> tuple[Executor, list[Worker]]:
    """Return an executor of the process whose neighbours are always in time, and the workers of its stages."""
    processes = plan.layout.processes
    source = DataPort(plan.layout.inputs, CPU, plan.numerics.channels_last, lambda report: None)
    loss_port = LossPort(CPU, recipe.losses, recipe.metrics)
    for port in (source, loss_port):
        port.start(data, 0, 0)
    stages = build_stages(plan, recipe, Runtime(), CPU, (0, process), blocks, source.refetch)
    transport = None
    if len(processes) > 1:
        transport = LockstepTransport(pack_boundaries(plan, CPU), processes, process, post=lambda operations: [_Done()])
    ports = connect(processes[process], source, loss_port, plan.boundaries, transport)
    workers = build_workers(plan, recipe, stages, ports, CPU, hooks)
    for worker in workers.values():
        worker.update.parts = [part for part in worker.update.parts if isinstance(part, UNDECIDED)]
    return Executor(plan, workers, transport, hooks), [*workers.values()]


def _without_data(block: nn.Module, channels_last: bool) -> nn.Module:
    """Replace the tensors of a block on the meta device by fake tensors, in the run's memory format."""
    fake_module(block)
    for part in block.modules() if channels_last else ():
        for name, p in [*part.named_parameters(recurse=False)]:
            if p.dim() == 4:
                setattr(part, name, nn.Parameter(p.detach().contiguous(memory_format=torch.channels_last), p.requires_grad))
    return block


def _bytes(tensors: Any) -> int:
    sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors}
    return sum(map(rounded, sizes.values()))
