"""Contestants that train the same blocks on the same microbatches with the same optimizer: PETRA, torch's pipelines, and replicas.

Each process has one stage, or one replica of the network. benchmarks/pipeline_peers.py has more of them, for CPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from petra import Method, Numerics, Pipeline, Plan, Recipe, Runtime, TensorSpec
from petra.cost_model.machines import synchronized_time
from petra.engine.endpoints import DataSource
from petra.engine.options.compile import compile_block
from petra.engine.recipe import OptimizerFactory
from petra.message_formats import MESSAGE_FORMATS, MessageFormat
from petra.reversible import derive_seed
from petra.settings import TransportName
from petra.specs import as_streams


class Batches:
    """k microbatches of noise, repeated, in pinned memory for a GPU. Inputs that are integers are tokens, with a target each."""

    def __init__(self, spec: TensorSpec, k: int, classes: int = 10, device: torch.device | str = "cpu") -> None:
        generator, shape = torch.Generator().manual_seed(derive_seed(0, k)), (k, *spec.shape)
        tokens = not spec.dtype.is_floating_point
        x = torch.randint(classes, shape, generator=generator) if tokens else torch.randn(shape, generator=generator)
        y = torch.randint(classes, (k, spec.shape[0] * (spec.shape[1] if tokens else 1)), generator=generator)
        self.x, self.y = (t.pin_memory() if torch.device(device).type == "cuda" else t for t in (x, y))

    def inputs(self, m: int) -> Tensor:
        return self.x[m % len(self.x)]

    def targets(self, m: int) -> Tensor:
        return self.y[m % len(self.y)]


@dataclass(frozen=True)
class Setting:
    """The work of all contestants.

    Attributes:
        plan: Model, form of a microbatch, k, stages and numerics. Each contestant has a method of its own.
        rank: Rank of this process.
        optimizer: Builds the optimizer of the blocks of a process, with its learning rate.
        device, compile: Device of this process, and compiler of blocks, as in :class:`petra.Runtime`.
        threads: Threads of contestants that run in one process.
    """

    plan: Plan
    rank: int
    optimizer: OptimizerFactory
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    compile: str | None = None
    threads: int = 2

    def layers(self, blocks: Iterable[int], *, divided: bool = True) -> dict[int, FormattedBlock]:
        """Build blocks for other libraries, by their index in the model. Messages travel between stages if they are ``divided``."""
        ends, model = [stage.blocks[0] for stage in self.plan.stages[1:] if divided], self.plan.model
        found = {b: FormattedBlock(model.build_block(b, 0), self.plan.numerics, b in ends, b + 1 in ends) for b in blocks}
        for layer in found.values() if self.compile else ():
            compile_block(layer.block, self.compile or "")
        return found

    def chained(self, layers: dict[int, FormattedBlock]) -> Chained:
        """Return a module of layers on the device, with the memory format of the run."""
        module = Chained(*layers.values()).to(self.device)
        return module.to(memory_format=torch.channels_last) if self.plan.numerics.channels_last else module  # type: ignore[call-overload]

    def run(self, layers: dict[int, FormattedBlock], update: Callable[[], object]) -> Contestant:
        """Return the run of a contestant that repeats ``update``."""
        return Contestant(repeated(update, self.plan.k, self.device), {b: layer.block for b, layer in layers.items()})


@dataclass(frozen=True)
class Contestant:
    """One contestant in this process.

    Attributes:
        train: Function that makes a number of updates and returns the seconds per microbatch. Every process must call it.
        blocks: Blocks that this process trains, by their index in the model.
        pipeline: The pipeline, if it is one of petra's.
    """

    train: Callable[[int], float]
    blocks: dict[int, nn.Module]
    pipeline: Pipeline | None = None


Peer = Callable[[Setting, Batches], Contestant]
"""Builds a contestant in this process. Every process must call it."""


def message_type(numerics: Numerics) -> torch.dtype:
    """Return the type in which other libraries send streams: that of a format that only rounds, otherwise float32."""
    found = MESSAGE_FORMATS.get(numerics.message_format or "")
    return getattr(torch, found.dtype) if type(found) is MessageFormat else torch.float32


class FormattedBlock(nn.Module):
    """A block that takes and returns tuples or single tensors, and computes in the type and memory format of ``numerics``.

    Args:
        receives: Whether the input comes from another process. Other libraries require contiguous messages.
        sends: Whether the output goes to another process.
    """

    def __init__(self, block: nn.Module, numerics: Numerics, receives: bool, sends: bool) -> None:
        super().__init__()
        self.block, self.numerics, self.receives = block, numerics, receives
        self.sent = message_type(numerics) if sends else torch.float32
        own = torch.channels_last if numerics.channels_last else torch.contiguous_format
        self.entry = own, torch.contiguous_format if receives else own
        self.exit = torch.contiguous_format if sends else own, own

    def forward(self, *streams: Any) -> Any:
        x, autocast = streams[0] if isinstance(streams[0], tuple) else streams, self.numerics.autocast
        x = tuple(t.float() for t in x) if self.receives else x  # messages may have another type
        with torch.autocast(x[0].device.type, autocast, enabled=autocast is not None):
            y = as_streams(self.block(*_formatted(x, *self.entry)))
        y = tuple(t.to(self.sent) for t in _formatted(y, *self.exit))
        return y if len(y) > 1 else y[0]


def _formatted(streams: tuple[Tensor, ...], forward: torch.memory_format, backward: torch.memory_format) -> tuple[Tensor, ...]:
    return tuple(_Formatted.apply(t, forward, backward) if t.dim() == 4 else t for t in streams)  # type: ignore[no-untyped-call]


class _Formatted(torch.autograd.Function):
    """Convert a tensor and its gradient to memory formats. Tensors that already have the format are not copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: torch.memory_format, backward: torch.memory_format) -> Tensor:
        ctx.format = backward
        return x.contiguous(memory_format=forward)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy.contiguous(memory_format=ctx.format), None, None


class Chained(nn.Sequential):
    """Sequence of layers that take and return tuples of tensors."""

    def forward(self, *x: Any) -> Any:
        y: Any = x
        for layer in self:
            y = layer(*as_streams(y))
        return y


def petra(method: Method, transport: TransportName) -> Peer:
    """Use :class:`petra.Pipeline`."""

    def build(setting: Setting, batches: Batches) -> Contestant:
        plan = setting.plan
        pipeline = Pipeline(
            plan.model,
            plan.inputs,
            Recipe(setting.optimizer, metrics={}),
            method=method,
            stages=[len(stage.blocks) for stage in plan.stages],
            runtime=Runtime(setting.device, transport, compile=setting.compile),
            k=plan.k,
            numerics=plan.numerics,
        )
        indices = (b for j in pipeline.stages for b in plan.stages[j].blocks)
        blocks = {b: block for b, (_, block) in zip(indices, pipeline.blocks(), strict=True)}

        def train(updates: int) -> float:
            count = updates * plan.k
            if method.flush or pipeline.microbatches_done == 0:  # only the first update equals that of plain autograd
                return repeated(lambda: pipeline.train(batches, count), count, setting.device)(1)
            return period(pipeline, batches, count + pipeline.plan.delays[0] + 1)

        return Contestant(train, blocks, pipeline)

    return build


def torch_schedule(name: str) -> Peer:
    """Use a schedule of torch.distributed.pipelining: ``Schedule1F1B``, ``ScheduleGPipe`` or ``ScheduleInterleavedZeroBubble``."""

    def build(setting: Setting, batches: Batches) -> Contestant:
        from torch.distributed import pipelining

        # Schedule1F1B requires at least as many microbatches as stages. With one microbatch GPipe runs the same order.
        k, stages = setting.plan.k, setting.plan.stages
        kind = getattr(pipelining, name if k >= len(stages) else "ScheduleGPipe")
        layers = setting.layers(stages[setting.rank].blocks)
        module = setting.chained(layers)
        stage = pipelining.PipelineStage(module, setting.rank, len(stages), setting.device)
        several = issubclass(kind, pipelining.ScheduleInterleavedZeroBubble)
        schedule = kind([stage] if several else stage, k, loss_fn=F.cross_entropy)
        optimizer, x, y = setting.optimizer(module), batches.x.flatten(0, 1), batches.y.flatten()

        def update() -> None:
            optimizer.zero_grad()
            if setting.rank == 0:
                schedule.step(x.to(setting.device, non_blocking=True))
            else:
                schedule.step(target=y.to(setting.device, non_blocking=True), return_outputs=False)
            optimizer.step()

        return setting.run(layers, update)

    return build


def replicas(setting: Setting, batches: Batches) -> Contestant:
    """Train a replica in each process with torch's DistributedDataParallel. Replicas divide the microbatches equally.

    Gradients travel in the type of messages.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    layers = setting.layers(range(len(setting.plan.model.blocks)), divided=False)
    devices = [setting.device] if setting.device.type == "cuda" else None
    module = DistributedDataParallel(setting.chained(layers), devices, broadcast_buffers=False, gradient_as_bucket_view=True)
    if message_type(setting.plan.numerics) is torch.bfloat16:
        module.register_comm_hook(None, bf16_compress_hook)
    own = range(setting.rank, setting.plan.k, dist.get_world_size())
    return setting.run(layers, _plain_update(setting, batches, module, own))


def one_device(setting: Setting, batches: Batches) -> Contestant:
    """Train the whole network in the first process. The other processes wait for it."""
    if setting.rank > 0:
        return setting.run({}, lambda: None)
    layers = setting.layers(range(len(setting.plan.model.blocks)), divided=False)
    return setting.run(layers, _plain_update(setting, batches, setting.chained(layers), range(setting.plan.k)))


def _plain_update(setting: Setting, batches: Batches, module: nn.Module, own: range) -> Callable[[], None]:
    """Return an update by autograd, with the mean gradient of the microbatches ``own``. Replicas average at the last one."""
    optimizer, device = setting.optimizer(module), setting.device

    def update() -> None:
        optimizer.zero_grad()
        for m in own:
            alone = isinstance(module, DistributedDataParallel) and m != own[-1]
            with module.no_sync() if alone else nullcontext():  # type: ignore[operator]
                x, y = (t.to(device, non_blocking=True) for t in (batches.inputs(m), batches.targets(m)))
                torch.autograd.backward(F.cross_entropy(module(x), y) / len(own))
        optimizer.step()

    return update


def repeated(update: Callable[[], object], k: int, device: torch.device | str = "cpu") -> Callable[[int], float]:
    """Return a function that makes a number of updates and returns the seconds per microbatch.

    The time is that from the common start of all processes to the end of this one.
    """
    device = torch.device(device)

    def train(updates: int) -> float:
        synchronized_time(device)
        dist.barrier()
        start = synchronized_time(device)
        for _ in range(updates):
            update()
        seconds = synchronized_time(device) - start
        dist.barrier()
        return seconds / (updates * k)

    return train


def period(pipeline: Pipeline, data: DataSource, microbatches: int) -> float:
    """Return the seconds per microbatch over whole updates, as long as the first stage still runs forwards.

    0 in processes without the first stage. On a GPU, events of its stream are the clock.
    """
    marks: list[Any] = []

    def mark(_: Tensor) -> None:
        if pipeline.device.type == "cuda":
            marks.append(event := torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            event.record()
        else:
            marks.append(time.perf_counter())

    pipeline.train(data, microbatches, on_microbatch=mark)
    steady = marks[: microbatches - pipeline.plan.delays[0]]
    whole = (len(steady) - 1) // pipeline.plan.k * pipeline.plan.k
    if not steady:
        return 0.0
    first, last = steady[0], steady[whole]
    return float(last - first if isinstance(first, float) else first.elapsed_time(last) / 1000) / whole
