"""Formats in which streams travel between stages. The configuration reads their names, so torch is not imported.

Names are the configuration's short ones (bf16, as in ``trainer.precision``); specs have torch's types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shape = tuple[int, ...]
Form = tuple[Shape, "torch.dtype"]


@dataclass(frozen=True)
class MessageFormat:
    """What the streams in one part of a message travel as: x, x̃ or δ. All that depends on a format reads it from here.

    This class only rounds. Subclasses may send other elements, and factors beside them: for each tensor, for parts of one, or for
    all tensors together, which they get in one call.

    Attributes:
        dtype: Name of the type of the elements.
        both_directions: Whether backward messages travel in this format too, and not in the type of their tensors.
        factor_dtype: Name of the type of the factors.
    """

    dtype: str
    both_directions: bool = True
    factor_dtype: str = "float32"

    def elements(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """Return the shapes of the elements, in ``dtype``, that travel for tensors of some shapes."""
        return shapes

    def factors(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """Return the shapes of the factors, in ``factor_dtype``, that travel with them."""
        return ()

    def pack(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the elements for some tensors, then the factors, before they are rounded to their types."""
        return tensors

    def unpack(self, pieces: Sequence[Tensor], forms: Sequence[Form]) -> Sequence[Tensor]:
        """Return the tensors, in their shapes and types, from the elements and factors that have arrived."""
        return [elements.to(dtype) for elements, (_, dtype) in zip(pieces, forms, strict=True)]


MESSAGE_FORMATS = {"bf16": MessageFormat("bfloat16")}
"""Formats by name, beside those of few bits."""
_MARKS = ("", "_token"), ("", "_stochastic")
FEW_BITS = tuple("".join(p) for p in product(("int8", "int4", "float8"), *_MARKS) if (p[0], p[2]) != ("float8", "_stochastic"))
"""Names of the formats of :mod:`petra.quantization`: elements, what has a scale (by default a tensor), rounding."""
