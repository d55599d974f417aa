"""Formats in which streams travel between stages. The configuration reads their names, so torch is not imported.

Names are the configuration's short ones (bf16, as in ``trainer.precision``); specs have torch's types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class MessageFormat:
    """What the streams in one part of a message travel as: x, x̃ or δ. All that depends on a format reads it from here.

    This class only rounds. Subclasses may send other elements, and factors beside them: for each tensor, for parts of one, or for
    all tensors together, which they get in one call.

    Attributes:
        dtype: Name of the type of the elements.
        both_directions: Whether backward messages travel in this format too, and not in the type of their tensors.
    """

    dtype: str
    both_directions: bool = True

    def elements(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """Return the shapes of the elements, in ``dtype``, that travel for tensors of some shapes."""
        return shapes

    def factors(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """Return the shapes of the factors, in float32, that travel with them."""
        return ()

    def pack(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the elements for some tensors, then the factors, before they are rounded to their types."""
        return tensors

    def unpack(self, pieces: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> Sequence[Tensor]:
        """Return the tensors, in their types, from the elements and factors that have arrived."""
        return [elements.to(dtype) for elements, dtype in zip(pieces, dtypes, strict=True)]


class Int8(MessageFormat):
    """Integers from -127 to 127, with one scale for each tensor: its largest magnitude, divided by 127.

    A value that is not finite makes the scale not finite, and so every value that arrives.
    """

    def factors(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        return [(1,) for _ in shapes]

    def pack(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        ranges = [t.aminmax() for t in tensors]
        scales = [high.maximum(-low).float().view(1).div(127).clamp(min=1e-30) for low, high in ranges]  # zeros have one, too
        return [*((t / scale).round() for t, scale in zip(tensors, scales, strict=True)), *scales]

    def unpack(self, pieces: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> Sequence[Tensor]:
        elements, scales = pieces[: len(dtypes)], pieces[len(dtypes) :]
        return [(e * scale).to(dtype) for e, scale, dtype in zip(elements, scales, dtypes, strict=True)]


MESSAGE_FORMATS = {
    "bf16": MessageFormat("bfloat16"),
    "int8": Int8("int8", both_directions=False),
}
"""Formats by name: values of ``trainer.message_format`` and of ``Numerics.message_format``."""
