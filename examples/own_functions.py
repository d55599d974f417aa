"""A model and a data set of your own for the command line (docs/own_model.md)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from petra import BlockSpec, Model
from petra.data import Dataset, Split
from petra.reversible import Coupling


class Pair(nn.Module):
    """Return two equal streams."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.clone()


class Head(nn.Linear):
    """Return class scores from both streams."""

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return super().forward(torch.cat([x1, x2], dim=1))


def coupling(size: int) -> Coupling:
    """Return a reversible block."""
    return Coupling(nn.Sequential(nn.Linear(size, size), nn.Tanh()))


def network(classes: int, size: int, depth: int = 2) -> Model:
    """Return the model. ``depth`` is set by ``model.depth``."""
    blocks = [BlockSpec(f"block{i}", partial(coupling, size)) for i in range(depth)]
    return Model("mine", (BlockSpec("pair", Pair), *blocks, BlockSpec("head", partial(Head, 2 * size, classes))))


def rows(size: int) -> Dataset:
    """Return rows of random numbers. The class of a row is the place of the largest of its first three numbers."""
    x = torch.randn(240, size, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)

    def split(first: int, last: int) -> Split:
        return Split(last - first, lambda i, seed: x[first:last][i], lambda i, seed: y[first:last][i], in_memory=True)

    return Dataset("rows", classes=3, size=size, train=split(0, 200), test=split(200, 240))
