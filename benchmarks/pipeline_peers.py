"""PETRA, other pipelines and checkpointing, which train the same blocks on the same microbatches with the same optimizer.

Each of two processes has one stage. Contestants that support only one process run in the first, with several threads.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.two_stages import period, sgd
from petra import Method, Model, Pipeline, Recipe, TensorSpec
from petra.reversible import derive_seed
from petra.settings import Numerics, Runtime, TransportName


class Batches:
    """k microbatches of noise, repeated."""

    def __init__(self, spec: TensorSpec, k: int, classes: int = 10) -> None:
        generator = torch.Generator().manual_seed(derive_seed(0, k))
        self.x = torch.randn(k, *spec.shape, generator=generator)
        self.y = torch.randint(classes, (k, spec.shape[0]), generator=generator)

    def inputs(self, m: int) -> Tensor:
        return self.x[m % len(self.x)]

    def targets(self, m: int) -> Tensor:
        return self.y[m % len(self.y)]


@dataclass(frozen=True)
class Setting:
    """The work of all contestants.

    Attributes:
        stages: Number of blocks in each stage.
        k: Microbatches per update.
        rank: Rank of this process.
        threads: Threads of contestants that run in one process.
    """

    model: Model
    inputs: TensorSpec
    stages: tuple[int, ...]
    k: int
    rank: int
    threads: int = 2

    def blocks(self, stage: int) -> range:
        """Return the indices of a stage's blocks in the model."""
        start = sum(self.stages[:stage])
        return range(start, start + self.stages[stage])

    def layers(self, blocks: Iterable[int]) -> dict[int, Layer]:
        """Build blocks for other libraries, by their index in the model."""
        first, last = ({self.blocks(j)[i] for j in range(len(self.stages))} for i in (0, -1))
        return {b: Layer(self.model.build_block(b, 0), receives=b in first, sends=b in last) for b in blocks}


@dataclass(frozen=True)
class Run:
    """One contestant in this process.

    Attributes:
        train: Function that makes a number of updates and returns the seconds per microbatch. Every process must call it.
        blocks: Blocks that this process trains, by their index in the model.
    """

    train: Callable[[int], float]
    blocks: dict[int, nn.Module]


Peer = Callable[[Setting, Batches], Run]


class Layer(nn.Module):
    """A block that takes and returns tuples or single tensors, and computes in channels-last format.

    Args:
        receives: Whether the input comes from another process. Other libraries require contiguous messages.
        sends: Whether the output goes to another process.
    """

    def __init__(self, block: nn.Module, *, receives: bool, sends: bool) -> None:
        super().__init__()
        self.block = block
        self.entry = torch.channels_last, torch.contiguous_format if receives else torch.channels_last
        self.exit = torch.contiguous_format if sends else torch.channels_last, torch.channels_last

    def forward(self, *streams: Any) -> Any:
        x = streams[0] if isinstance(streams[0], tuple) else streams
        y = _formatted(_tuple(self.block(*_formatted(x, *self.entry))), *self.exit)
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
            y = layer(*_tuple(y))
        return y


def petra(method: Method, transport: TransportName) -> Peer:
    """Use :class:`petra.Pipeline`."""

    def build(setting: Setting, batches: Batches) -> Run:
        pipeline = Pipeline(
            setting.model,
            setting.inputs,
            Recipe(sgd, metrics={}),
            method=method,
            stages=setting.stages,
            runtime=Runtime(transport=transport),
            k=setting.k,
            numerics=Numerics(channels_last=True),
        )
        blocks = dict(zip(setting.blocks(setting.rank), pipeline.stages[setting.rank].module, strict=True))

        def train(updates: int) -> float:
            if method.flush:
                return _timed(lambda: pipeline.train(batches, updates * setting.k), updates * setting.k)
            if pipeline.microbatches_done == 0:  # only the first update equals that of plain autograd
                pipeline.train(batches, setting.k)
                return 0.0
            return period(pipeline, batches, updates * setting.k + pipeline.plan.delays[0] + 1)  # type: ignore[arg-type]

        return Run(train, blocks)

    return build


def torch_schedule(name: str) -> Peer:
    """Use a schedule of torch.distributed.pipelining: ``Schedule1F1B``, ``ScheduleGPipe`` or ``ScheduleInterleavedZeroBubble``."""

    def build(setting: Setting, batches: Batches) -> Run:
        from torch.distributed import pipelining

        # Schedule1F1B requires at least as many microbatches as stages. With one microbatch GPipe runs the same order.
        kind = getattr(pipelining, name if setting.k >= len(setting.stages) else "ScheduleGPipe")
        layers = setting.layers(setting.blocks(setting.rank))
        module = Chained(*layers.values()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        stage = pipelining.PipelineStage(module, setting.rank, len(setting.stages), torch.device("cpu"))
        several = issubclass(kind, pipelining.ScheduleInterleavedZeroBubble)
        schedule = kind([stage] if several else stage, setting.k, loss_fn=F.cross_entropy)
        optimizer, x, y = sgd(module), batches.x.flatten(0, 1), batches.y.flatten()

        def update() -> None:
            optimizer.zero_grad()
            if setting.rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, return_outputs=False)
            optimizer.step()

        return Run(_repeated(update, setting.k), _blocks(layers))

    return build


def deepspeed(setting: Setting, batches: Batches) -> Run:
    """Use DeepSpeed's pipeline engine, without ZeRO, in float32."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(LOCAL_RANK=str(setting.rank), LOCAL_SIZE=str(len(setting.stages)))
    with redirect_stdout(io.StringIO()):
        import deepspeed as library
        from deepspeed.pipe import PipelineModule

        library.utils.logger.setLevel("ERROR")
        library.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        layers = setting.layers(range(sum(setting.stages)))
        module = PipelineModule(
            list(layers.values()), num_stages=len(setting.stages), loss_fn=F.cross_entropy, partition_method="uniform"
        )
        engine, *_ = library.initialize(
            model=module,
            optimizer=sgd(module),
            config={
                "train_micro_batch_size_per_gpu": setting.inputs.shape[0],
                "gradient_accumulation_steps": setting.k,
                "gradient_clipping": 0.0,
                "steps_per_print": 1 << 30,
            },
            dist_init_required=False,
        )
    module.to(memory_format=torch.channels_last)  # only now, because initialize broadcasts the parameters
    data = list(zip(batches.x, batches.y, strict=True))
    own = {b: layers[b] for b in setting.blocks(setting.rank)}
    return Run(_repeated(lambda: engine.train_batch(iter(data)), setting.k), _blocks(own))


def torchgpipe(setting: Setting, batches: Batches) -> Run:
    """Use torchgpipe, with all stages in one process and stored graphs. On a CPU it has one worker thread for all stages."""
    from torchgpipe import GPipe

    def build(layers: Sequence[nn.Module]) -> Callable[[], None]:
        devices = ["cpu"] * len(setting.stages)
        network = GPipe(nn.Sequential(*layers), setting.stages, devices=devices, chunks=setting.k, checkpoint="never")
        x, y = batches.x.flatten(0, 1), batches.y.flatten()
        return lambda: F.cross_entropy(network(x), y).backward()

    return _alone(setting, build)


def checkpointed(setting: Setting, batches: Batches) -> Run:
    """Train in one process with a checkpoint around every block."""
    from torch.utils.checkpoint import checkpoint

    def build(layers: Sequence[nn.Module]) -> Callable[[], None]:
        def accumulate() -> None:
            for m in range(setting.k):
                y: Any = batches.inputs(m)
                for layer in layers:
                    y = checkpoint(layer, *_tuple(y), use_reentrant=False)
                (F.cross_entropy(y, batches.targets(m)) / setting.k).backward()

        return accumulate

    return _alone(setting, build)


def _alone(setting: Setting, build: Callable[[Sequence[nn.Module]], Callable[[], None]]) -> Run:
    """Return a contestant that runs in the first process only. The other processes wait for it."""
    if setting.rank != 0:
        return Run(_repeated(lambda: None, setting.k), {})
    layers = setting.layers(range(sum(setting.stages)))
    module = nn.ModuleList(layers.values()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    accumulate, optimizer = build(list(module)), sgd(module)

    def update() -> None:
        torch.set_num_threads(setting.threads)
        optimizer.zero_grad()
        accumulate()
        optimizer.step()
        torch.set_num_threads(1)

    return Run(_repeated(update, setting.k), _blocks(layers))


def _repeated(update: Callable[[], object], k: int) -> Callable[[int], float]:
    def several(updates: int) -> None:
        for _ in range(updates):
            update()

    return lambda updates: _timed(lambda: several(updates), updates * k)


def _timed(work: Callable[[], object], microbatches: int) -> float:
    """Return the seconds per microbatch, from the common start of all processes to the end of this one."""
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    dist.barrier()
    return seconds / microbatches


def _blocks(layers: dict[int, Layer]) -> dict[int, nn.Module]:
    return {b: layer.block for b, layer in layers.items()}


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)
