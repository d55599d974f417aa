"""RevNet's Table 1, measured: activations held and work done by four ways to backpropagate through L blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from petra.analysis.flops import FlopMeter
from petra.diagnostics.activation_memory import GraphMeter
from petra.reversible import Coupling, ReversibleSequence
from petra.reversible.coupling import Pair

BATCH, FEATURES = 8, 32
Scheme = Callable[[Sequence[nn.Module], Pair], Pair]
"""Forward through blocks such that a backward can follow."""


@dataclass(frozen=True)
class Cost:
    """Of one forward and backward through L blocks.

    Attributes:
        activations: held at most, in inputs of a block.
        forwards: work, in forwards of a block, for each block: 3 if nothing is computed twice.
    """

    activations: float
    forwards: float


def everything(blocks: Sequence[nn.Module], x: Pair) -> Pair:
    """Plain autograd: O(L) activations."""
    for block in blocks:
        x = block(*x)
    return x


def segments(blocks: Sequence[nn.Module], x: Pair) -> Pair:
    """√L segments whose inputs are kept, O(√L) activations (Martens and Sutskever 2012; Chen et al. 2016, section 4.1)."""
    length = math.isqrt(len(blocks) - 1) + 1
    for start in range(0, len(blocks), length):
        x = _recomputed(everything, blocks[start : start + length], x)
    return x


def recursive(blocks: Sequence[nn.Module], x: Pair) -> Pair:
    """Halves whose inputs are kept, each computed again in the same way: O(log L) activations (Chen et al. 2016, section 4.4)."""
    if len(blocks) == 1:
        return everything(blocks, x)
    middle = len(blocks) // 2
    return _recomputed(recursive, blocks[middle:], _recomputed(recursive, blocks[:middle], x))


def reversible(blocks: Sequence[nn.Module], x: Pair) -> Pair:
    """Only the output: O(1) activations (Gomez et al. 2017, Algorithm 1)."""
    return ReversibleSequence(cast(Sequence[Coupling], blocks))(*x)  # type: ignore[no-any-return]


SCHEMES: dict[str, Scheme] = {
    "naive": everything,
    "checkpointing": segments,
    "recursive checkpointing": recursive,
    "reversible": reversible,
}


def measure(scheme: Scheme, length: int) -> Cost:
    """Forward and backward through ``length`` equal couplings."""
    torch.manual_seed(0)
    blocks = [Coupling(nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False), nn.Tanh())) for _ in range(length)]
    x1, x2 = (torch.randn(BATCH, FEATURES, requires_grad=True) for _ in range(2))
    held = GraphMeter(excluded=[p for block in blocks for p in block.parameters()])
    with held.watching(), FlopMeter() as flops:
        y1, y2 = scheme(blocks, (x1, x2))
        torch.autograd.backward((y1 * y2).sum())
    forward = 2 * BATCH * FEATURES**2
    return Cost(activations=held.peak / (x1.nbytes + x2.nbytes), forwards=flops.total / forward / length)


def _recomputed(scheme: Scheme, blocks: Sequence[nn.Module], x: Pair) -> Pair:
    if not torch.is_grad_enabled():  # inside of another one's first forward, which keeps nothing
        return scheme(blocks, x)
    return checkpoint(lambda *pair: scheme(blocks, pair), *x, use_reentrant=True, preserve_rng_state=False)  # type: ignore[no-any-return]
