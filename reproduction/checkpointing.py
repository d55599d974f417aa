"""RevNet's Table 1: stored activations and work of four ways to backpropagate through L blocks. Both scales are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from launch.runtime.terminal import table
from petra.analysis.plots import Panel
from petra.reversible import Coupling, ReversibleSequence
from petra.reversible.coupling import Pair
from petra.torch_private import TorchDispatchMode
from reproduction.stored_memory import GraphMeter

from .paper import REVNET_TABLE1
from .report import Report, Request

BATCH, FEATURES = 8, 32
LENGTHS = (4, 16, 64, 256)
Scheme = Callable[[Sequence[nn.Module], Pair], Pair]
"""Runs a forward through blocks so that a backward can follow."""


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the FLOPs of all operations inside the ``with`` block in ``total``.

    Unlike torch's ``FlopCounterMode`` it does not hook modules, so graphs may be differentiated in parts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


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


def table1(request: Request) -> Report:
    """Measure four ways to backpropagate through L equal couplings (RevNet, Table 1)."""
    found = {name: {n: measure(scheme, n) for n in LENGTHS} for name, scheme in SCHEMES.items()}
    parts = []
    for column, (key, title) in enumerate(
        (
            ("activations", "Largest number of stored activations, in inputs of a block"),
            ("forwards", "Compute per block, in forwards of a block"),
        )
    ):
        lines = [
            [name, REVNET_TABLE1[name][column], *(f"{getattr(by_length[n], key):.3g}" for n in LENGTHS)]
            for name, by_length in found.items()
        ]
        parts.append(f"{title}:\n\n" + table(("scheme", "order of all blocks, paper", *(f"L = {n}" for n in LENGTHS)), lines))
    parts.append(
        "Plain backpropagation computes 3 forwards per block, recursive checkpointing log₂ L more. The paper's section 4 counts "
        "2L, 3L, L log L and 3L, with a backward as expensive as a forward; its section 3.2 counts 3 and 4 per connection, as here."
    )
    curves = {name: [(float(n), by_length[n].activations) for n in LENGTHS] for name, by_length in found.items()}
    panel = Panel("L, blocks", "stored activations, in inputs of a block", curves, "log", powers=True)
    data = {name: {n: asdict(by_length[n]) for n in LENGTHS} for name, by_length in found.items()}
    return Report("\n".join(parts) + "\n", data, [panel], columns=1)


def _recomputed(scheme: Scheme, blocks: Sequence[nn.Module], x: Pair) -> Pair:
    if not torch.is_grad_enabled():  # Inside the first forward of an outer checkpoint, which stores nothing.
        return scheme(blocks, x)
    return checkpoint(lambda *pair: scheme(blocks, pair), *x, use_reentrant=True, preserve_rng_state=False)  # type: ignore[no-any-return]
