"""Memory that a GPU's allocator will reach, predicted by running the engine on tensors without data.

The prediction runs the code of a training run: stages, optimizer, messages and schedule of one process, in torch's FakeTensorMode.
Every allocation and release is counted in the order in which they happen, so the peak includes what exists for a moment only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petra.diagnostics.activation_memory import fake_module
from petra.engine.build import Recipe, build_remedies, build_stages, build_workers
from petra.engine.endpoints import DataPort, Objective
from petra.engine.executor import Executor
from petra.engine.update import Update
from petra.hooks import Hook, Hooks
from petra.plan import Plan
from petra.settings import Runtime
from petra.specs import Streams, TensorSpec
from petra.torch_private import TorchDispatchMode, fake_tensor_mode, storage_key
from petra.transport import LockstepTransport, connect, pack_boundaries

BLOCK = 512
"""Sizes of tensors are rounded up to a multiple of this number of bytes, as torch's CUDA allocator does."""
WORKSPACE = 32 * 2**20
"""Allowance for workspaces of cuBLAS, in bytes: the default on Hopper GPUs. Those of cuDNN depend on its choice of algorithms."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes of one process at the peak of training.

    Attributes:
        weights: Parameters and buffers.
        gradients: Accumulated gradients.
        optimizer: States of the optimizer, and moving averages.
        stored: What else exists when a forward ends: stored activations, stashed weights, and messages that have arrived or are
            being sent.
        temporary: What is added during the step that reaches the peak: the graph of a backward, and its gradients.
        workspace: Allowance for workspaces of libraries.
    """

    weights: int
    gradients: int
    optimizer: int
    stored: int
    temporary: int
    workspace: int = WORKSPACE

    @property
    def tensors(self) -> int:
        """Peak of torch's allocator without workspaces."""
        return self.weights + self.gradients + self.optimizer + self.stored + self.temporary

    @property
    def total(self) -> int:
        """Peak with workspaces. The CUDA context and NCCL's buffers, which are not torch's, come on top."""
        return self.tensors + self.workspace


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations inside the ``with`` block create, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for value in found if isinstance(found, list | tuple) else (found,):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor):
                    self._add(tensor)
        return found

    def _add(self, tensor: Tensor) -> None:
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key in self._seen:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK

        def freed(_: object) -> None:
            self.now -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


class _Update(Update):
    """Updates without decisions that read values."""

    def apply(self, squared_norm: Tensor) -> None:
        if self.optimizer is not None:
            with self.stage.updating():
                self.optimizer.step()
        self._average.update(self.done)
        self.done += 1
        self._finite.finish_update()

    @property
    def states(self) -> list[Tensor]:
        """Tensors of the optimizer, and moving averages."""
        states = [] if self.optimizer is None else [t for state in self.optimizer.state.values() for t in state.values()]
        return [*self._average.values, *(t for t in states if isinstance(t, Tensor))]


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
    """Records the bytes that live when a forward ends."""

    def __init__(self, live: LiveBytes) -> None:
        self._live, self.between = live, 0

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        self.between = max(self.between, self._live.now)


class _Done:
    """Handle of an operation that has ended."""

    def wait(self) -> None:
        return


def predict_memory(plan: Plan, recipe: Recipe, targets: TensorSpec, *, process: int = 0) -> PredictedMemory:
    """Predict the memory of one process, with all its stages. Needs neither a GPU nor the memory that it predicts.

    Args:
        plan: Plan of the run. Between processes, the lockstep transport is assumed.
        recipe: Training settings. Their functions are called with tensors without data.
        targets: Shape and type of a microbatch's targets (of a replica's share).
        process: Process of the pipeline, from 0.

    Raises:
        PetraError: If this torch has no FakeTensorMode.
    """
    hooks, live = Hooks(), LiveBytes()
    with torch.device("meta"):
        blocks = {b: plan.model.blocks[b].build().train() for j in plan.layout.processes[process] for b in plan.stages[j].blocks}
    with fake_tensor_mode(), live:
        data = _Blank(plan.layout.inputs, targets)
        channels_last = plan.numerics.channels_last
        executor, updates = _executor(plan, recipe, data, process, hooks, lambda b: _without_data(blocks[b], channels_last))
        watch = _Watch(live)
        hooks.attach(watch)
        longest = max((plan.delays[j] for j in plan.layout.processes[process]), default=0)
        executor.train(0, longest + 2 * plan.k + 2)
        weights = _bytes(t for u in updates for t in (*u.stage.module.parameters(), *u.stage.module.buffers()))
        gradients = _bytes(p.grad for u in updates for p in u.stage.module.parameters() if p.grad is not None)
        optimizer = _bytes(t for u in updates for t in u.states)
    fixed = weights + gradients + optimizer
    return PredictedMemory(weights, gradients, optimizer, watch.between - fixed, live.peak - watch.between)


def _executor(
    plan: Plan, recipe: Recipe, data: _Blank, process: int, hooks: Hooks, blocks: Callable[[int], nn.Module]
) -> tuple[Executor, list[_Update]]:
    """Return an executor of the process whose neighbours are always in time, and the updates of its stages."""
    processes = plan.layout.processes
    source = DataPort(plan.layout.inputs, CPU, plan.numerics.channels_last, lambda report: None)
    objective = Objective(CPU, recipe.losses, recipe.metrics)
    for port in (source, objective):
        port.start(data, 0, 0)
    stages = build_stages(plan, recipe, Runtime(), CPU, process, hooks, blocks, source.refetch)
    transport = None
    if len(processes) > 1:
        transport = LockstepTransport(pack_boundaries(plan, CPU), processes, process, post=lambda operations: [_Done()])
    ports = connect(processes[process], source, objective, plan.boundaries, transport)
    workers = build_workers(plan, recipe, stages, ports, CPU, hooks, _Update)
    build_remedies(plan, recipe, workers)
    updates = [worker.update for worker in workers.values() if isinstance(worker.update, _Update)]
    return Executor(plan, workers, transport, hooks, runner=None, on_completed=None), updates


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
    return sum(-(-size // BLOCK) * BLOCK for size in sizes.values())
