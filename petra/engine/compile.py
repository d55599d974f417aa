"""``torch.compile`` inside blocks: the functions F and G, or a whole block that isn't reversible."""

from __future__ import annotations

import torch
from torch import nn

from petra.reversible import ReversibleBlock

VARIANTS = 64
"""Compiled variants of one piece of code: all modules of torch share a few, and each differs in shape, with and without graph,
with frozen statistics, and in evaluation. Torch's own limit of 8 would leave most of a network uncompiled."""


def compile_block(block: nn.Module, backend: str) -> None:
    """Compiles a block in place, at its first call; names and values of its state stay.

    A reversible block's forward, inverse and vector-Jacobian product call its functions one by one, so those are compiled.
    """
    torch._dynamo.config.recompile_limit = VARIANTS
    for part in block.children() if isinstance(block, ReversibleBlock) else (block,):
        part.compile(backend=backend, dynamic=False)
