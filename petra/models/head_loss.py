"""Cross entropy of a linear output layer, computed in chunks of rows, for large vocabularies.

The logits (N, C) of N tokens and C classes are the largest tensors of a small language model: 0.5 GB in float32 for 1,024 tokens of
a vocabulary of 128,256, and the loss and its gradient need as much again. With :func:`without_logits`, the last block returns the
input of its output layer with the layer's weight, and :class:`LinearCrossEntropy` computes the loss and the gradients of both
without whole logits. Results differ from those of the plain loss by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra.errors import ModelError, alternatives, check_types, require
from petra.model import BlockSpec, Model
from petra.specs import IGNORED, Streams
from petra.torch_private import storage_key


def without_logits(model: Model, linear: str | None = None) -> Model:
    """Return a model whose last block returns (input (N, D), weight (C, D), bias (C)) of its output layer; no bias if it has none.

    The weights and the keys of their state are the same. Use :class:`LinearCrossEntropy` as the loss, and no metric of logits.

    Args:
        linear: Name of the output layer in the last block; None for its last ``nn.Linear``. The block must return the layer's
            output, flattened to (N, C).

    Raises:
        ModelError: When the block is built, if it has no such ``nn.Linear``; in a forward pass, if it changes the layer's output.
    """
    *blocks, head = model.blocks
    return replace(model, blocks=(*blocks, BlockSpec(head.name, partial(_without_logits, head, linear))))


def _without_logits(head: BlockSpec, linear: str | None) -> nn.Module:
    block = head.build()
    layers = {name: layer for name, layer in block.named_modules() if type(layer) is nn.Linear}
    name = next(reversed(layers), "") if linear is None else linear
    expected = "a block with an nn.Linear" if linear is None else alternatives(layers)
    require(name in layers, f"output layer of block {head.name}", expected, linear or "none", ModelError)
    layers[name].__class__ = _Skipped
    block.register_forward_hook(partial(_with_weight, head.name, name))
    return block


class _Skipped(nn.Linear):
    """Linear layer that returns its input, whose storage it remembers."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            super().forward(x)  # a profile counts the operations, which the loss will run, to balance the stages
        self.returned = storage_key(x)
        return x


def _with_weight(block: str, name: str, module: nn.Module, inputs: Streams, output: Tensor) -> Streams:
    layer = module.get_submodule(name)
    assert isinstance(layer, _Skipped)
    unchanged = output.dim() == 2 and storage_key(output) == layer.returned
    expected = f"a block that returns the output of {name}, flattened to two dimensions"
    require(unchanged, f"block {block}", expected, "another tensor", ModelError)
    weights = (layer.weight,) if layer.bias is None else (layer.weight, layer.bias)
    return (output, *(weights if torch.is_grad_enabled() else (w.detach() for w in weights)))


@dataclass(frozen=True)
class LinearCrossEntropy:
    """Mean cross entropy of ``F.linear(hidden, weight, bias)`` over targets other than -100, without whole logits.

    Uses :func:`torch.nn.functional.linear_cross_entropy` if torch has it (2.13), unless labels are smoothed, which its chunks don't
    support, or the products are in a shorter type than the input, to which it would round the loss, too; otherwise the same in
    chunks of our own. Both compute the gradients together with the loss: 3 matrix products per row.

    Attributes:
        label_smoothing: As for :func:`torch.nn.functional.cross_entropy`.
        rows: Rows in a chunk.
        dtype: Type of the matrix products, as under autocast; None for that of the input.
    """

    outputs: ClassVar[tuple[int, ...]] = (2, 3)
    outputs_with_rows: ClassVar[int] = 1
    mean_over_targets: ClassVar[bool] = True
    label_smoothing: Annotated[float, ">= 0 and <= 1"] = 0.0
    rows: Annotated[int, ">= 1"] = 64
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_types(self)

    def __call__(self, hidden: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        """Return the loss, given hidden (N, D), weight (C, D), possibly bias (C), and int64 targets (N)."""
        *bias, targets = rest
        tensors = [t if self.dtype is None else t.to(self.dtype) for t in (hidden, weight, *bias)]
        if self.label_smoothing == 0 and tensors[0] is hidden and hasattr(F, "linear_cross_entropy"):
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=self.rows)
            loss = F.linear_cross_entropy(
                tensors[0], tensors[1], targets, linear_bias=tensors[2] if bias else None, options=options
            )
        else:
            loss = _InChunks.apply(targets, self.rows, self.label_smoothing, *tensors)  # type: ignore[no-untyped-call]
        return loss.to(hidden.dtype)


class _InChunks(torch.autograd.Function):
    """Loss of :class:`LinearCrossEntropy`. The forward pass computes the gradients, which the backward pass scales."""

    @staticmethod
    def forward(ctx: Any, targets: Tensor, rows: int, label_smoothing: float, *tensors: Tensor) -> Tensor:
        hidden, weight, *bias = tensors
        exact = torch.promote_types(hidden.dtype, torch.float32)
        count, total = (targets != IGNORED).sum(), torch.zeros((), dtype=exact, device=hidden.device)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=exact)
        d_bias = [torch.zeros_like(b) for b in bias]
        for start in range(0, len(hidden), rows):
            chosen = slice(start, start + rows)
            with torch.enable_grad():
                logits = F.linear(hidden[chosen], weight, *bias).detach().requires_grad_()
                loss = F.cross_entropy(logits.to(exact), targets[chosen], reduction="sum", label_smoothing=label_smoothing) / count
            total += loss.detach()
            if not any(ctx.needs_input_grad):
                continue
            (d_logits,) = torch.autograd.grad(loss, logits)
            d_hidden[chosen] = d_logits @ weight
            if exact == weight.dtype:
                d_weight.addmm_(d_logits.T, hidden[chosen])
            else:
                d_weight += d_logits.T @ hidden[chosen]  # rounded once, after the sum
            for d in d_bias:
                d += d_logits.sum(0)
        ctx.gradients = d_hidden, d_weight, *d_bias
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        require(gradients is not None, "loss", "one backward pass (its gradients are scaled in place)", "another one", ModelError)
        return (None, None, None, *(g.mul_(scale) for g in gradients))
