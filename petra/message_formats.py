"""Formats in which floating-point tensors travel between stages. The configuration reads their names, so torch is not imported.

Names are the configuration's short ones (bf16, as in ``trainer.precision``); specs have torch's types.
"""

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
        both_directions: Whether backward messages travel in this format too, and not in the type of their tensors.
    """

    dtype: str
    pack: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: (tensor,)
    unpack: Callable[[Sequence[Tensor], torch.dtype], Tensor] = lambda parts, dtype: parts[0].to(dtype)
    factors: int = 0
    both_directions: bool = True


def _to_bytes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor divided by its scale, rounded to integers from -127 to 127, and the scale, its largest magnitude / 127.

    A value that is not finite makes the scale not finite, and so every value that arrives.
    """
    low, high = tensor.aminmax()
    scale = high.maximum(-low).float().view(1).div(127).clamp(min=1e-30)  # zeros have a scale, too
    return (tensor / scale).round(), scale


MESSAGE_FORMATS = {
    "bf16": MessageFormat("bfloat16"),
    "int8": MessageFormat(
        "int8", _to_bytes, lambda parts, dtype: (parts[0] * parts[1]).to(dtype), factors=1, both_directions=False
    ),
}
"""Formats by name: values of ``trainer.message_format`` and of ``Numerics.message_format``."""
