"""Reversible backpropagation on one device: an ordinary module whose ``loss.backward()`` stores no activations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from petra.reversible.coupling import Pair, ReversibleBlock
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
        trained = [[p for p in block.parameters() if p.requires_grad] for block in self.blocks]
        if torch.is_grad_enabled() and (any(trained) or x1.requires_grad or x2.requires_grad):
            seed, carried = int(torch.randint(1 << 62, ())), _Carried(len(trained) - 1)
            for i, (block, parameters) in enumerate(zip(self.blocks, trained, strict=True)):
                step = _Step(cast(ReversibleBlock, block), i, derive_seed(seed, i), parameters, carried)
                x1, x2 = _ReversibleBackprop.apply(step, x1, x2, *parameters)  # type: ignore[no-untyped-call]
            return x1, x2
        for block in self.blocks:
            x1, x2 = block(x1, x2)
        return x1, x2


@dataclass
class _Carried:
    """What the backward pass hands from block to block: the output of the next to be undone."""

    last: int
    y: Pair | None = None


@dataclass(frozen=True)
class _Step:
    block: ReversibleBlock
    index: int
    seed: int
    parameters: list[nn.Parameter]
    carried: _Carried


class _ReversibleBackprop(torch.autograd.Function):
    """One block. Only the last one's output is saved; those before it get theirs from the block behind them.

    The parameters are inputs, so that hooks, ``torch.autograd.grad`` and data-parallel wrappers see their gradients; each block's
    are added to ``.grad`` before the next block's are made.
    """

    @staticmethod
    def forward(ctx: Any, step: _Step, x1: Tensor, x2: Tensor, *_: Tensor) -> Pair:
        device = x1.device.type
        # Casts cached under no_grad would cut the graph of whoever uses the same weights next.
        ctx.step = step
        ctx.autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
            "cache_enabled": False,
        }
        with frozen_statistics(normalisations(step.block)), torch.autocast(**ctx.autocast):
            y = step.block(x1, x2, seed=step.seed)
        if step.index == step.carried.last:
            ctx.save_for_backward(*y)
        return cast(Pair, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy1: Tensor, dy2: Tensor) -> tuple[Any, ...]:
        step: _Step = ctx.step
        y = ctx.saved_tensors if step.index == step.carried.last else step.carried.y
        with torch.autocast(**ctx.autocast):
            x, dx, gradients = step.block.inverse_vjp(cast(Pair, y), (dy1, dy2), seed=step.seed)
        step.carried.y = x if step.index > 0 else None
        return None, *dx, *(gradients.get(p) for p in step.parameters)
