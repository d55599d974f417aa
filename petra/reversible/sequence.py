"""Reversible backpropagation on one device: an ordinary module that stores no activations for ``loss.backward()``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from petra.errors import ModelError, require
from petra.reversible.coupling import Pair, ReversibleBlock, trainable_parameters
from petra.reversible.replay import NOTHING, autocast_to, derive_seed, forbid_buffer_changes, frozen_statistics, normalisations
from petra.specs import Streams
from petra.torch_private import NormBase, is_replica, is_transformed, module_hooks, storage_key, version_counter, withheld_hooks


class ReversibleSequence(nn.Module):
    """Reversible blocks in a row. Training stores only the last output, at any depth (Gomez et al. 2017, Algorithm 1).

    Example::

        blocks = ReversibleSequence(Coupling(branch()) for _ in range(16))
        y1, y2 = blocks(x1, x2)  # streams of one shape (B, ...)
        loss(y1, y2).backward()

    Parameters get gradients even if the input needs none. The backward pass updates running statistics, once, and uses the forward
    pass's dropout masks and autocast settings. Double backward is not supported. In transforms of ``torch.func`` and exported
    programs, the blocks run by plain autograd, which stores activations.

    Args:
        blocks: The blocks, in the order of the forward pass.

    Raises:
        ModelError: If a block is not reversible. In a forward pass, if a block changes a buffer that is no running statistic of a
            normalisation, if a hook replaces a stream, if ``fully_shard`` was applied to a part of a block, or in a replica of
            ``nn.DataParallel``.
        RuntimeError: In the backward pass, if a parameter, buffer or mode of a block has changed since the forward pass.
    """

    def __init__(self, blocks: Iterable[ReversibleBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        for i, block in enumerate(self.blocks):
            got = type(block).__name__
            require(isinstance(block, ReversibleBlock), f"block {i}", "a reversible block, such as Coupling(f)", got, ModelError)
        self._checked = False

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        require(not is_replica(self), "ReversibleSequence", "DistributedDataParallel", "DataParallel", ModelError)
        trains = torch.is_grad_enabled() and (x1.requires_grad or x2.requires_grad or any(map(trainable_parameters, self.blocks)))
        plain = not trains or is_transformed() or torch.compiler.is_exporting()
        checked, self._checked = self._checked, self._checked or not plain
        seed, outputs = 0 if plain else int(torch.randint(1 << 62, ())), list[Streams]()
        for i, block in enumerate(self.blocks):
            if plain or not (x1.requires_grad or x2.requires_grad or trainable_parameters(block)):
                x1, x2 = block(x1, x2)
                continue
            last = i == len(self.blocks) - 1
            step = _Step(cast(ReversibleBlock, block), i, derive_seed(seed, i), last, outputs, checked)
            x1, x2 = step.run(x1, x2)
        return x1, x2


class _Step:
    """One block's part in a forward pass and its backward pass.

    Args:
        last: Whether it is the last block, which saves its output.
        outputs: Output of a block, reconstructed by the backward pass of the block after it. All blocks share it.
        checked: Whether a forward pass has shown before that the block leaves its buffers as they are.
    """

    def __init__(self, block: ReversibleBlock, index: int, seed: int, last: bool, outputs: list[Streams], checked: bool) -> None:
        self.block, self.index, self.seed, self.last = block, index, seed, last
        self.outputs, self.checked, self.done = outputs, checked, False
        self.function: Callable[..., Streams] = block

    def run(self, x1: Tensor, x2: Tensor) -> Pair:
        """Return the output. Hooks of the block see its graph: those of ``fully_shard`` gather parameters and reduce gradients."""
        block: Any = self.block
        if not module_hooks(block):
            return self._apply(x1, x2)
        own, self.function, inside = vars(block).get("forward"), block.forward, list[Tensor]()

        def forward(x1: Tensor, x2: Tensor) -> Pair:
            y = self._apply(x1, x2)
            inside[:] = x1, x2, *y
            return y

        block.forward = forward
        try:
            y1, y2 = block(x1, x2)
        finally:
            del block.forward
            if own is not None:
                block.forward = own
        for a, b in zip(inside, (x1, x2, y1, y2), strict=True):
            kept = a.dtype != b.dtype or a.data_ptr() == b.data_ptr()  # fully_shard may convert types
            require(kept, f"block {self.index}", "hooks that leave its input and output as they are", "another tensor", ModelError)
        return y1, y2

    def _apply(self, x1: Tensor, x2: Tensor) -> Pair:
        if not self.checked:
            inner = [name for name, module in self.block.named_modules() if name and hasattr(module, "set_requires_gradient_sync")]
            require(not inner, f"block {self.index}", "fully_shard of the whole block", f"fully_shard of its {inner}", ModelError)
        self.parameters, self._state = trainable_parameters(self.block), _state(self.block)
        y: Pair = _ReversibleBackprop.apply(self, x1, x2, *self.parameters)  # type: ignore[no-untyped-call]
        return y

    def require_unchanged(self) -> None:
        """Raise the error of autograd if the backward pass would not evaluate what the forward pass has evaluated."""
        if (now := _state(self.block)) != (before := self._state):
            block = self.block
            named = (*block.named_parameters(), *block.named_buffers(), *block.named_modules())
            name = next((name for name, each in named if now.get(each) != before.get(each)), "a module")
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{name} of block {self.index} of a ReversibleSequence, between the forward and the backward pass"
            )


def _state(block: nn.Module) -> dict[nn.Module | Tensor, object]:
    """Return what an evaluation of a block depends on: the modes of its modules, and memory and versions of its tensors."""
    found = dict[nn.Module | Tensor, object]()
    for module in block.modules():
        found[module] = module.training
        unread = isinstance(module, NormBase) and module.training  # running statistics
        buffers = () if unread else module._buffers.values()
        for tensor in (*module._parameters.values(), *buffers):
            if tensor is not None:
                found[tensor] = tensor.requires_grad, version_counter(tensor), storage_key(tensor)
    return found


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
            y1, y2 = step.function(x1, x2, seed=step.seed)
        y = y1.detach(), y2.detach()  # a coupling returns x2, which autograd would make a view
        if step.last:
            ctx.save_for_backward(*y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy1: Tensor, dy2: Tensor) -> tuple[Any, ...]:
        step: _Step = ctx.step
        step.require_unchanged()
        dy, y = (dy1, dy2), ctx.saved_tensors if step.last else step.outputs.pop()
        if step.last:
            dy = _in_format_of(y[0], dy1), _in_format_of(y[1], dy2)
        statistics = frozen_statistics(normalisations(step.block)) if step.done else NOTHING  # again, as the graph was retained
        with statistics, withheld_hooks(step.parameters), autocast_to(ctx.device, ctx.autocast):
            x, dx, gradients = step.block.inverse_vjp(cast(Streams, y), dy, seed=step.seed)
        step.outputs[:], step.done = [x] if step.index > 0 else [], True
        return None, *dx, *(gradients.get(p) for p in step.parameters)


def _in_format_of(y: Tensor, dy: Tensor) -> Tensor:
    """Return ``dy`` in the memory format of ``y``. A loss often returns another one, which every kernel would have to convert."""
    return dy if dy.stride() == y.stride() else torch.empty_like(y, dtype=dy.dtype).copy_(dy)
