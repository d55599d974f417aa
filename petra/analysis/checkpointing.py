"""RevNet's Table 1, measured: stored activations and work of four ways to backpropagate through L blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from petra.analysis.flops import FlopCounter
from petra.diagnostics.activation_memory import GraphMeter
from petra.reversible import Coupling, ReversibleSequence
from petra.reversible.coupling import Pair

BATCH, FEATURES = 8, 32
Scheme = Callable[[Sequence[nn.Module], Pair], Pair]
"""Runs a forward through blocks so that a backward can follow."""


@dataclass(frozen=True)
class Cost:
    """Cost of one forward and backward through L blocks.

    Attributes:
        activations: Largest number of stored activations, in inputs of a block.
        forwards: Work for each block, in forwards of a block: 3 if nothing is computed twice.
    """

    activations: float
    forwards: float


def store_all(blocks: Sequence[nn.Module], x: Pair) -> Pair:
    """Run plain autograd, which stores O(L) activations."""
    for block in blocks:
        x = block(*x)
    return x


def checkpoint_segments(blocks: Sequence[nn.Module], x: Pair) -> Pair:
    """Store the inputs of √L segments: O(√L) activations (Martens and Sutskever 2012; Chen et al. 2016, section 4.1)."""
    length = math.isqrt(len(blocks) - 1) + 1
    for start in range(0, len(blocks), length):
        x = _recomputed(store_all, blocks[start : start + length], x)
    return x


def checkpoint_recursively(blocks: Sequence[nn.Module], x: Pair) -> Pair:
    """Store the inputs of two halves and recompute each in the same way: O(log L) activations (Chen et al. 2016, section 4.4)."""
    if len(blocks) == 1:
        return store_all(blocks, x)
    middle = len(blocks) // 2
    first = _recomputed(checkpoint_recursively, blocks[:middle], x)
    return _recomputed(checkpoint_recursively, blocks[middle:], first)


def reconstruct(blocks: Sequence[nn.Module], x: Pair) -> Pair:
    """Store only the output: O(1) activations (Gomez et al. 2017, Algorithm 1)."""
    return ReversibleSequence(cast(Sequence[Coupling], blocks))(*x)  # type: ignore[no-any-return]


SCHEMES: dict[str, Scheme] = {
    "naive": store_all,
    "checkpointing": checkpoint_segments,
    "recursive checkpointing": checkpoint_recursively,
    "reversible": reconstruct,
}


def measure(scheme: Scheme, length: int) -> Cost:
    """Run a forward and a backward through ``length`` equal couplings, and return their cost."""
    torch.manual_seed(0)
    blocks = [Coupling(nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False), nn.Tanh())) for _ in range(length)]
    x1, x2 = (torch.randn(BATCH, FEATURES, requires_grad=True) for _ in range(2))
    graphs = GraphMeter(excluded=[p for block in blocks for p in block.parameters()])
    with graphs.counting(), FlopCounter() as flops:
        y1, y2 = scheme(blocks, (x1, x2))
        torch.autograd.backward((y1 * y2).sum())
    forward = 2 * BATCH * FEATURES**2
    return Cost(activations=graphs.peak / (x1.nbytes + x2.nbytes), forwards=flops.total / forward / length)


def _recomputed(scheme: Scheme, blocks: Sequence[nn.Module], x: Pair) -> Pair:
    if not torch.is_grad_enabled():  # Inside the first forward of an outer checkpoint, which stores nothing.
        return scheme(blocks, x)
    return checkpoint(lambda *pair: scheme(blocks, pair), *x, use_reentrant=True, preserve_rng_state=False)  # type: ignore[no-any-return]
