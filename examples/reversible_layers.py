"""A reversible vision transformer in a plain training loop, and the same network in a pipeline.

python examples/reversible_layers.py

Prints the loss of each epoch of the loop, and then of one epoch in a pipeline of four stages.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from petra import Model, Pipeline, Recipe, TensorSpec
from petra.models import RevViTLayer
from petra.reversible import ReversibleSequence

DEPTH, WIDTH = 6, 32


class Patches(nn.Module):
    """The 16 patches of 2x2 pixels of images (B, 8, 8), as two equal streams (B, 16, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.positions = nn.Linear(4, WIDTH), nn.Parameter(torch.zeros(16, WIDTH))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(F.unfold(images[:, None], 2, stride=2).transpose(1, 2)) + self.positions
        return x, x


class Head(nn.Module):
    """Logits (B, 10) of the mean of both streams."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, 10)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        logits: Tensor = self.linear(torch.cat([x1, x2], 2).mean(1))
        return logits


class Network(nn.Module):
    """Stem, reversible layers and head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = Patches(), Head()
        self.layers = ReversibleSequence(RevViTLayer(WIDTH, heads=4, depth=DEPTH) for _ in range(DEPTH))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(*self.layers(*self.stem(images)))
        return logits


class Digits:
    """The same microbatches for the pipeline: number m has 32 images."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images.split(32), labels.split(32)

    def inputs(self, m: int) -> Tensor:
        return self.images[m]

    def targets(self, m: int) -> Tensor:
        return self.labels[m]


def main(epochs: int = 6, count: int = 1792) -> list[float]:
    """Train on ``count`` images with a plain loop, then in a pipeline. Return the loss of each epoch, and of the pipeline."""
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.images[:count], dtype=torch.float32) / 16, torch.tensor(data.target[:count])
    network = Network()
    optimizer, losses = torch.optim.AdamW(network.parameters(), lr=3e-3), []
    for epoch in range(epochs):
        total = 0.0
        for x, y in zip(images.split(32), labels.split(32), strict=True):
            loss = F.cross_entropy(network(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / (count // 32))
        print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")

    model = Model.of("digits", {"stem": network.stem, "layers": network.layers, "head": network.head})
    recipe = Recipe(lambda module: torch.optim.AdamW(module.parameters(), lr=5e-4))  # smaller, because gradients are stale
    spec = TensorSpec((32, 8, 8), torch.float32)
    pipeline = Pipeline(model, spec, recipe, method="petra", stages=4)
    losses.append(pipeline.train(Digits(images, labels), count // 32).loss)
    print(f"PETRA with {len(model.blocks)} blocks in 4 stages: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
