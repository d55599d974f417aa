"""Sums in the memory of one of their terms. This saves allocating memory, which takes as long as several additions."""

from __future__ import annotations

from torch import Tensor

from petra.torch_private import ONE_HOLDER

Holders = tuple[int, int, int] | None
SMALL = 2**14
"""Elements up to which allocating memory takes less time than finding out whether it can be saved."""


def can_hold_sum(held: Holders, term: Tensor, other: Tensor) -> bool:
    """Return whether the sum of ``term`` and ``other`` can overwrite ``term``: it has the same form, and nobody else reads it.

    The memory formats may differ. The sum then has that of ``term``.

    Args:
        held: ``holders(term)`` (:func:`petra.torch_private.holders`), from a function in which one local variable refers to it.
    """
    return held is not None and held == ONE_HOLDER and _form(term) == _form(other) and _has_own_memory(term)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, type(tensor)


def _has_own_memory(tensor: Tensor) -> bool:
    """Return whether the tensor's memory contains each of its elements once, and nothing else."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes
