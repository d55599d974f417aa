"""Reversible blocks, and backpropagation through them without stored activations. Usable alone, on one device."""

from petra.reversible.coupling import Coupling, Gradients, ReversibleBlock, TwoFunctionCoupling
from petra.reversible.grid import Grid
from petra.reversible.replay import derive_seed, forbid_inplace, frozen_statistics, normalisations, running_statistics, seeded
from petra.reversible.sequence import ReversibleSequence

__all__ = [
    "Coupling",
    "Gradients",
    "Grid",
    "ReversibleBlock",
    "ReversibleSequence",
    "TwoFunctionCoupling",
    "derive_seed",
    "forbid_inplace",
    "frozen_statistics",
    "normalisations",
    "running_statistics",
    "seeded",
]
