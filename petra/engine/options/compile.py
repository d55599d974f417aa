"""``torch.compile`` for blocks: for the functions F and G of a reversible block, and for any other block as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from petra.reversible import ReversibleBlock
from petra.torch_private import set_recompile_limit

RECOMPILE_LIMIT = 64
"""Number of variants that ``torch.compile`` may make of one code object.

All modules share a few code objects of PyTorch. They need a variant for each shape, with and without graph, with frozen running
statistics, and for evaluation. PyTorch's default of 8 would leave most of a network uncompiled."""


MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes of inductor."""
WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that replay CUDA graphs on a GPU."""


def compile_block(block: nn.Module, compiler: str | Callable[..., object]) -> None:
    """Compile a block in place when it is first called. Names and values in its state dict don't change.

    Args:
        compiler: A backend of ``torch.compile``, or one of :data:`MODES`.

    The forward pass, inverse and vector-Jacobian product of a reversible block call its functions, so those are compiled.
    ``Module.compile`` would leave an ``nn.Sequential`` as it is, because torch does not compile its own modules' frames.
    """
    set_recompile_limit(RECOMPILE_LIMIT)
    for part in block.children() if isinstance(block, ReversibleBlock) else (block,):
        chosen = {"mode": compiler} if compiler in MODES else {"backend": compiler}
        compiled = torch.compile(part.forward, dynamic=False, **chosen)
        part.forward = partial(_cloned, compiled) if compiler in WITH_CUDA_GRAPHS else compiled


def _cloned(function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Return copies of a function's outputs. The next replay of a CUDA graph overwrites them, and other microbatches need them."""
    y = function(*inputs)
    return y.clone() if isinstance(y, Tensor) else tuple(t.clone() for t in y)
