"""Formats in which floating-point tensors travel between stages. The configuration reads their names, so torch is not imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class MessageFormat(NamedTuple):
    """What a tensor with another type, such as float32, travels as. Everything that depends on a format reads it from here.

    Attributes:
        dtype: Name of the type of the elements.
        pack: Returns the elements of a tensor, then its factors, before they are rounded to their types.
        unpack: Returns a tensor of a type from the elements and factors that have arrived.
        factors: Number of float32 factors that travel with a tensor.
        backward: Whether backward messages travel in this format too, and not in the type of their tensors.
    """

    dtype: str
    pack: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: (tensor,)
    unpack: Callable[[Sequence[Tensor], torch.dtype], Tensor] = lambda parts, dtype: parts[0].to(dtype)
    factors: int = 0
    backward: bool = True


def _to_bytes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor divided by its scale, rounded to integers from -127 to 127, and the scale, its largest magnitude / 127.

    A value that is not finite makes the scale not finite, and so every value that arrives.
    """
    low, high = tensor.aminmax()
    scale = high.maximum(-low).float().view(1).div(127).clamp(min=1e-30)  # zeros have a scale, too
    return (tensor / scale).round(), scale


MESSAGE_FORMATS = {
    "bf16": MessageFormat("bfloat16"),
    "int8": MessageFormat("int8", _to_bytes, lambda parts, dtype: (parts[0] * parts[1]).to(dtype), factors=1, backward=False),
}
"""Formats by name: values of ``trainer.streams`` and of ``Numerics.wire``."""
