"""Reversible backpropagation on one device: an ordinary module whose ``loss.backward()`` stores no activations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from petra.reversible.coupling import Gradients, Pair, ReversibleBlock, add_gradients
from petra.reversible.grid import Grid
from petra.reversible.replay import derive_seed, frozen_statistics, normalisations


class ReversibleSequence(nn.Module):
    """Reversible blocks in a row; training holds only the last output, whatever the depth (Gomez et al. 2017, Algorithm 1).

    Example::

        blocks = ReversibleSequence(Coupling(branch()) for _ in range(16))
        y1, y2 = blocks(x1, x2)
        loss(y1, y2).backward()

    Parameters get their gradients even if the input needs none. Running statistics move in the backward pass, once; dropout masks
    and autocast are those of the forward pass. Gradients of gradients are not supported.

    Args:
        grid: reconstruct bit for bit, with streams on this grid (:mod:`petra.reversible.grid`), whose ``require()`` tells whether
            they stayed in its range.
    """

    def __init__(self, blocks: Iterable[ReversibleBlock], *, grid: Grid | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.grid = grid
        if grid is not None:
            for block in self.blocks:
                cast(ReversibleBlock, block).carry_on(grid)

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        if self.grid is not None:
            x1, x2 = self.grid.enter(x1), self.grid.enter(x2)
        parameters = [p for p in self.parameters() if p.requires_grad]
        if torch.is_grad_enabled() and (parameters or x1.requires_grad or x2.requires_grad):
            seed = int(torch.randint(1 << 62, ()))
            return cast(Pair, _ReversibleBackprop.apply(self, parameters, seed, x1, x2, *parameters))  # type: ignore[no-untyped-call]
        for block in self.blocks:
            x1, x2 = block(x1, x2)
        return x1, x2


class _ReversibleBackprop(torch.autograd.Function):
    """The parameters are inputs, so that hooks, ``torch.autograd.grad`` and data-parallel wrappers see their gradients."""

    @staticmethod
    def forward(
        ctx: Any, sequence: ReversibleSequence, parameters: list[nn.Parameter], seed: int, x1: Tensor, x2: Tensor, *_: Tensor
    ) -> Pair:
        ctx.sequence, ctx.parameters, ctx.seed = sequence, parameters, seed
        device = x1.device.type
        # Casts cached under no_grad would cut the graph of whoever uses the same weights next.
        ctx.autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
            "cache_enabled": False,
        }
        with frozen_statistics(normalisations(sequence)), torch.autocast(**ctx.autocast):
            for i, block in enumerate(sequence.blocks):
                x1, x2 = block(x1, x2, seed=derive_seed(seed, i))
        ctx.save_for_backward(x1, x2)
        return x1, x2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy1: Tensor, dy2: Tensor) -> tuple[Any, ...]:
        y, dy = ctx.saved_tensors, (dy1, dy2)
        gradients: Gradients = {}
        with torch.autocast(**ctx.autocast):
            for i, block in reversed(list(enumerate(ctx.sequence.blocks))):
                y, dy, found = cast(ReversibleBlock, block).inverse_vjp(y, dy, seed=derive_seed(ctx.seed, i))
                add_gradients(gradients, found)
        return None, None, None, *dy, *(gradients.get(p) for p in ctx.parameters)
