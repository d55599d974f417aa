"""``torch.compile`` for blocks: for the functions F and G of a reversible block, and for any other block as a whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from petra.reversible import ReversibleBlock
from petra.torch_private import set_recompile_limit

RECOMPILE_LIMIT = 64
"""Number of variants that ``torch.compile`` may make of one code object.

All modules share a few code objects of PyTorch. They need a variant for each shape, with and without graph, with frozen running
statistics, and for evaluation. PyTorch's default of 8 would leave most of a network uncompiled."""


def compile_block(block: nn.Module, backend: str | Callable[..., object]) -> None:
    """Compile a block in place when it is first called. Names and values in its state dict don't change.

    The forward pass, inverse and vector-Jacobian product of a reversible block call its functions, so those are compiled.
    ``Module.compile`` would leave an ``nn.Sequential`` as it is, because torch does not compile its own modules' frames.
    """
    set_recompile_limit(RECOMPILE_LIMIT)
    for part in block.children() if isinstance(block, ReversibleBlock) else (block,):
        part.forward = torch.compile(part.forward, backend=backend, dynamic=False)
