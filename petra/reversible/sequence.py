"""Reversible backpropagation on one device: an ordinary module that stores no activations for ``loss.backward()``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from petra.reversible.coupling import Pair, ReversibleBlock, trainable_parameters
from petra.reversible.replay import NOTHING, autocast_to, derive_seed, forbid_buffer_changes, frozen_statistics, normalisations
from petra.specs import Streams


class ReversibleSequence(nn.Module):
    """Reversible blocks in a row. Training stores only the last output, at any depth (Gomez et al. 2017, Algorithm 1).

    Example::

        blocks = ReversibleSequence(Coupling(branch()) for _ in range(16))
        y1, y2 = blocks(x1, x2)  # streams of one shape (B, ...)
        loss(y1, y2).backward()

    Parameters get gradients even if the input needs none. The backward pass updates running statistics, once, and uses the forward
    pass's dropout masks and autocast settings. Double backward is not supported.

    Args:
        blocks: The blocks, in the order of the forward pass.

    Raises:
        ModelError: In the first forward pass, if a block changes a buffer that is no running statistic of a normalisation.
    """

    def __init__(self, blocks: Iterable[ReversibleBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._checked = False

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        checked, self._checked = self._checked, True
        trainable = [trainable_parameters(block) for block in self.blocks]
        if torch.is_grad_enabled() and (any(trainable) or x1.requires_grad or x2.requires_grad):
            seed, reconstructed = int(torch.randint(1 << 62, ())), list[Streams]()
            for i, (block, parameters) in enumerate(zip(self.blocks, trainable, strict=True)):
                last = i == len(trainable) - 1
                step = _Step(cast(ReversibleBlock, block), i, derive_seed(seed, i), parameters, last, reconstructed, checked)
                x1, x2 = _ReversibleBackprop.apply(step, x1, x2, *parameters)  # type: ignore[no-untyped-call]
            return x1, x2
        for block in self.blocks:
            x1, x2 = block(x1, x2)
        return x1, x2


@dataclass(frozen=True)
class _Step:
    """One block's part in a forward pass and its backward pass."""

    block: ReversibleBlock
    index: int
    seed: int
    parameters: list[nn.Parameter]
    last: bool
    """Whether it is the last block, which saves its output."""
    reconstructed: list[Streams]
    """Output of a block, reconstructed by the backward pass of the block after it. The blocks of one forward pass share it."""
    checked: bool
    """Whether a forward pass has shown before that the block leaves its buffers as they are."""


class _ReversibleBackprop(torch.autograd.Function):
    """One block. Only the last block saves its output; the others get theirs from the backward pass of the block after them.

    The parameters are inputs, so hooks, ``torch.autograd.grad`` and data-parallel wrappers see their gradients. Autograd adds each
    block's gradients to ``.grad`` before the next block's are computed.
    """

    @staticmethod
    def forward(ctx: Any, step: _Step, x1: Tensor, x2: Tensor, *_: Tensor) -> Pair:
        ctx.step, device = step, x1.device.type
        ctx.device, ctx.autocast = device, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        check = NOTHING if step.checked else forbid_buffer_changes(step.block, f"block {step.index}")
        with frozen_statistics(normalisations(step.block)), check, autocast_to(device, ctx.autocast):
            y = step.block(x1, x2, seed=step.seed)
        if step.last:
            ctx.save_for_backward(*y)
        return cast(Pair, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy1: Tensor, dy2: Tensor) -> tuple[Any, ...]:
        step: _Step = ctx.step
        dy = dy1, dy2
        y = ctx.saved_tensors if step.last else step.reconstructed.pop()
        if step.last:
            dy = _in_format_of(y[0], dy1), _in_format_of(y[1], dy2)
        with autocast_to(ctx.device, ctx.autocast):
            x, dx, gradients = step.block.inverse_vjp(cast(Streams, y), dy, seed=step.seed)
        step.reconstructed[:] = [x] if step.index > 0 else []
        return None, *dx, *(gradients.get(p) for p in step.parameters)


def _in_format_of(y: Tensor, dy: Tensor) -> Tensor:
    """Return ``dy`` in the memory format of ``y``. A loss often returns another one, which every kernel would have to convert."""
    return dy if dy.stride() == y.stride() else torch.empty_like(y, dtype=dy.dtype).copy_(dy)
