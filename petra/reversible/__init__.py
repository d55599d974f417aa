"""Reversible blocks, and backpropagation through them without stored activations. Usable alone, on one device."""

from petra.reversible.coupling import (
    Coupling,
    DownsamplingCoupling,
    Gradients,
    LaterGradients,
    ReversibleBlock,
    TwoFunctionCoupling,
)
from petra.reversible.grid import Grid
from petra.reversible.replay import derive_seed, forbid_inplace, frozen_statistics, normalisations, running_statistics, seeded
from petra.reversible.sequence import ReversibleSequence
from petra.reversible.split_backward import Differentiate, differentiate, differentiate_inputs

unchanged = forbid_inplace
"""Former name of :class:`forbid_inplace`."""

__all__ = [
    "Coupling",
    "Differentiate",
    "DownsamplingCoupling",
    "Gradients",
    "Grid",
    "LaterGradients",
    "ReversibleBlock",
    "ReversibleSequence",
    "TwoFunctionCoupling",
    "derive_seed",
    "differentiate",
    "differentiate_inputs",
    "forbid_inplace",
    "frozen_statistics",
    "normalisations",
    "running_statistics",
    "seeded",
    "unchanged",
]
