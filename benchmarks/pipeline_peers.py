"""Contestants for CPUs beside those of :mod:`launch.bench.contestants`: other libraries and checkpointing.

Each of two processes has one stage. Contestants that support only one process run in the first, with several threads.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.two_stages import sgd
from launch.bench.contestants import Batches, Chained, Contestant, FormattedBlock, Setting, torch_schedule
from petra.specs import as_streams


def deepspeed(setting: Setting, batches: Batches) -> Contestant:
    """Use DeepSpeed's pipeline engine, without ZeRO, in float32."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(LOCAL_RANK=str(setting.rank), LOCAL_SIZE=str(len(setting.plan.stages)))
    with redirect_stdout(io.StringIO()):
        import deepspeed as library
        from deepspeed.pipe import PipelineModule

        library.utils.logger.setLevel("ERROR")
        library.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        layers = setting.layers(range(len(setting.plan.model.blocks)))
        module = PipelineModule(
            list(layers.values()), num_stages=len(setting.plan.stages), loss_fn=F.cross_entropy, partition_method="uniform"
        )
        engine, *_ = library.initialize(
            model=module,
            optimizer=sgd(module),
            config={
                "train_micro_batch_size_per_gpu": setting.plan.inputs.shape[0],
                "gradient_accumulation_steps": setting.plan.k,
                "gradient_clipping": 0.0,
                "steps_per_print": 1 << 30,
            },
            dist_init_required=False,
        )
    module.to(memory_format=torch.channels_last)  # only now, because initialize broadcasts the parameters
    data = list(zip(batches.x, batches.y, strict=True))
    own = {b: layers[b] for b in setting.plan.stages[setting.rank].blocks}
    return setting.run(own, lambda: engine.train_batch(iter(data)))


def recomputed(setting: Setting, batches: Batches) -> Contestant:
    """Use torch's 1F1B with a checkpoint around every block, which stores its input."""
    return torch_schedule("Schedule1F1B")(Recomputing(**vars(setting)), batches)


class Recomputing(Setting):
    """Setting whose layers recompute what they compute."""

    def chained(self, layers: dict[int, FormattedBlock]) -> Chained:
        """Return a module of layers with a checkpoint around each."""
        return super().chained({b: Checkpointed(layer) for b, layer in layers.items()})  # type: ignore[misc]


class Checkpointed(nn.Module):
    """Layer that stores its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *streams: Any) -> Any:
        return checkpoint(self.layer, *streams, use_reentrant=False)


def torchgpipe(setting: Setting, batches: Batches) -> Contestant:
    """Use torchgpipe, with all stages in one process and stored graphs. On a CPU it has one worker thread for all stages."""
    from torchgpipe import GPipe

    def build(layers: Sequence[nn.Module]) -> Callable[[], None]:
        stages = [len(stage.blocks) for stage in setting.plan.stages]
        network = GPipe(nn.Sequential(*layers), stages, devices=["cpu"] * len(stages), chunks=setting.plan.k, checkpoint="never")
        x, y = batches.x.flatten(0, 1), batches.y.flatten()
        return lambda: F.cross_entropy(network(x), y).backward()

    return _alone(setting, build)


def checkpointed(setting: Setting, batches: Batches) -> Contestant:
    """Train in one process with a checkpoint around every block."""

    def build(layers: Sequence[nn.Module]) -> Callable[[], None]:
        def accumulate() -> None:
            for m in range(setting.plan.k):
                y: Any = batches.inputs(m)
                for layer in layers:
                    y = checkpoint(layer, *as_streams(y), use_reentrant=False)
                (F.cross_entropy(y, batches.targets(m)) / setting.plan.k).backward()

        return accumulate

    return _alone(setting, build)


def _alone(setting: Setting, build: Callable[[Sequence[nn.Module]], Callable[[], None]]) -> Contestant:
    """Return a contestant that runs in the first process only. The other processes wait for it."""
    if setting.rank != 0:
        return setting.run({}, lambda: None)
    layers = setting.layers(range(len(setting.plan.model.blocks)), divided=False)
    module = nn.ModuleList(layers.values()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    accumulate, optimizer = build(list(module)), sgd(module)

    def update() -> None:
        torch.set_num_threads(setting.threads)
        optimizer.zero_grad()
        accumulate()
        optimizer.step()
        torch.set_num_threads(1)

    return setting.run(layers, update)
