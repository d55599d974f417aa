"""Your own network on your own data: ``python examples/own_data.py`` learns to separate two spirals.

docs/own_model.md explains blocks; examples/own_model.py is a network of convolutions.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from petra import BlockSpec, Model, Pipeline, Recipe, TensorSpec
from petra.reversible import Coupling, TwoFunctionCoupling

WIDTH = 32


class Stem(nn.Linear):
    """Map points (B, 2) to two streams (B, WIDTH)."""

    def forward(self, points: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(super().forward(points)).chunk(2, dim=1)


class Head(nn.Linear):
    """Map both streams to the logits (B, 2)."""

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return super().forward(torch.cat([x1, x2], dim=1))


def branch() -> nn.Module:
    """Return a function inside a reversible block. It keeps the shape of a stream."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def network() -> Model:
    """Return four reversible blocks between a stem and a head."""
    return Model(
        "spirals",
        (
            BlockSpec("stem", partial(Stem, 2, 2 * WIDTH)),
            *(BlockSpec(f"block{i}", lambda: Coupling(branch())) for i in (0, 1)),
            *(BlockSpec(f"block{i}", lambda: TwoFunctionCoupling(branch(), branch())) for i in (2, 3)),
            BlockSpec("head", partial(Head, 2 * WIDTH, 2)),
        ),
    )


class Spirals:
    """Points on two spirals, as a data source: any object that returns inputs and targets of microbatch m.

    The first stage calls ``inputs`` and the last one ``targets``, also in different processes. So both must depend on m only.
    """

    def __init__(self, batch_size: int, seed: int) -> None:
        self.batch_size, self.seed = batch_size, seed

    def inputs(self, m: int) -> Tensor:
        return self._draw(m)[0]

    def targets(self, m: int) -> Tensor:
        return self._draw(m)[1]

    def _draw(self, m: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + m)
        labels = torch.randint(2, (self.batch_size,), generator=generator)
        radius = torch.rand(self.batch_size, generator=generator).sqrt()
        angle = 3 * torch.pi * radius + torch.pi * labels
        points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        return points + 0.01 * torch.randn(points.shape, generator=generator), labels


def main(rounds: int = 6) -> float:
    """Train six stages with PETRA, and return the accuracy on points of another seed (0 … 1)."""
    torch.set_num_threads(1)
    inputs = TensorSpec((64, 2), torch.float32)
    pipeline = Pipeline(network(), inputs, Recipe(lambda module: torch.optim.Adam(module.parameters(), lr=3e-3)), method="petra")
    train, test = Spirals(64, seed=0), Spirals(64, seed=1)
    for done in range(1, rounds + 1):
        result, tested = pipeline.train(train, 500), pipeline.evaluate(test, 20)
        print(f"after {500 * done} microbatches: loss {result.loss:.3f}, test accuracy {tested.metrics['accuracy']:.1%}")
    return tested.metrics["accuracy"]


if __name__ == "__main__":
    main()
