"""Reversible blocks and backpropagation through them without stored activations; usable alone on one device."""

from petra.reversible.coupling import Coupling, DownsamplingCoupling, Gradients, ReversibleBlock, TwoFunctionCoupling
from petra.reversible.grid import Grid
from petra.reversible.replay import derive_seed, frozen_statistics, normalisations, seeded, unchanged
from petra.reversible.sequence import ReversibleSequence

__all__ = [
    "Coupling",
    "DownsamplingCoupling",
    "Gradients",
    "Grid",
    "ReversibleBlock",
    "ReversibleSequence",
    "TwoFunctionCoupling",
    "derive_seed",
    "frozen_statistics",
    "normalisations",
    "seeded",
    "unchanged",
]
