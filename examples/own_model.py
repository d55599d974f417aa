"""Train your own network with PETRA (docs/own_model.md).

Run all stages in one process with ``python examples/own_model.py``, or one stage in each of three processes with
``torchrun --nproc-per-node 3 examples/own_model.py``.
"""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petra import BlockSpec, Model, Pipeline, Recipe, TensorSpec
from petra.data import EvalSource, TrainSource, load_dataset
from petra.reversible import Coupling
from petra.training import MultiStep, sgd


class Patches(nn.Module):
    """Embed patches of 4x4 pixels, and return two streams."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Conv2d(3, 2 * channels, kernel_size=4, stride=4), nn.BatchNorm2d(2 * channels))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.embed(x).chunk(2, dim=1)


class Merge(nn.Module):
    """Concatenate both streams and average over the image."""

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return torch.cat([x1, x2], dim=1).mean((2, 3))


def branch(channels: int) -> nn.Module:
    """Return the function F of a reversible block. It keeps the shape and does not modify its input."""
    return nn.Sequential(nn.Conv2d(channels, channels, kernel_size=3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())


def block(channels: int) -> Coupling:
    """Return the reversible block (x1, x2) → (x2, x1 + F(x2))."""
    return Coupling(branch(channels))


def network(channels: int = 32, depth: int = 4, classes: int = 10) -> Model:
    """Return the network as a list of blocks. Any split into consecutive blocks can be trained as stages."""
    return Model(
        "patches",
        (
            BlockSpec("patches", partial(Patches, channels)),  # not reversible: stores its input, the image
            *(BlockSpec(f"block{i}", partial(block, channels)) for i in range(depth)),  # reversible: store nothing
            BlockSpec("merge", Merge),
            BlockSpec("head", partial(nn.Linear, 2 * channels, classes)),
        ),
    )


def main(epochs: int = 6) -> float:
    """Train on images of handwritten digits, and return the test accuracy (0 … 1)."""
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    digits = load_dataset("digits")
    train, test = TrainSource(digits, batch_size=32, seed=0, augment=False), EvalSource(digits, batch_size=32)
    inputs = TensorSpec((32, 3, 32, 32), torch.float32)
    rate = MultiStep(0.02, train.batches_per_epoch, epochs, milestones=[4])
    pipeline = Pipeline(network(), inputs, Recipe(sgd, rate), method="petra", stages=3)
    for epoch in range(epochs):
        training, test_result = pipeline.train(train, train.batches_per_epoch), pipeline.evaluate(test, test.batches)
        if pipeline.rank == 0:
            print(f"epoch {epoch + 1}: loss {training.loss:.3f}, test accuracy {test_result.metrics['accuracy']:.1%}")
    if distributed:
        del pipeline  # before its process group
        dist.destroy_process_group()
    return test_result.metrics["accuracy"]


if __name__ == "__main__":
    main()
