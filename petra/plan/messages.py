"""Messages between stages: the tensors that travel over a boundary in each direction, with their shapes and types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from petra.method import Keep
from petra.settings import Numerics
from petra.specs import MessageSpec, PackedPart, TensorSpec, format_of, is_side


class Boundary(NamedTuple):
    """The messages that two neighbouring stages exchange for each microbatch.

    Attributes:
        forward: ``(x,)`` from the stage upstream, with its side tensors.
        backward: ``(x̃, δ, (report,))`` from the stage downstream; x̃ is empty unless the stage upstream reconstructs, and both if
            nothing upstream is trained.
    """

    forward: MessageSpec
    backward: MessageSpec

    @property
    def forward_bytes(self) -> int:
        """Size of a forward message in bytes."""
        return sum(PackedPart(part).bytes for part in self.forward)

    @property
    def backward_bytes(self) -> int:
        """Size of a backward message in bytes, without the report; 0 if it has no gradient."""
        return sum(PackedPart(part).bytes for part in self.backward[:-1])

    def __str__(self) -> str:
        forward, backward = (", ".join(str(spec) for part in message for spec in part) for message in self)
        return f"({forward}) forward and ({backward}) backward"


def returns_activations(keep: Keep) -> bool:
    """Return whether backward messages carry x̃, the output of a stage whose last block stores ``keep``.

    A block that stores nothing needs its output back to reconstruct its input; all others need only the gradient.
    """
    return keep is Keep.NOTHING


def boundary(outputs: Sequence[TensorSpec], keep: Keep, numerics: Numerics, metrics: int, trained: bool = True) -> Boundary:
    """Return the messages over the boundary after a stage.

    Args:
        outputs: Specs of the stage's output.
        keep: What the stage's last block stores.
        metrics: Number of entries of the metrics in a report, besides targets and loss.
        trained: Whether the stage, or one before it, has trained parameters.
    """
    streams = tuple(
        replace(
            spec,
            channels_last=numerics.channels_last and len(spec.shape) == 4,
            message_format=numerics.message_format if spec.dtype.is_floating_point else None,
        )
        for spec in outputs
    )
    x, delta = numerics.message_format, numerics.gradient_format
    if delta is None:  # x̃ and δ travel alike
        x = delta = x if x is not None and format_of(x).both_directions else None
    own = [spec for spec in streams if not is_side(spec)]
    returned, back = (tuple(replace(spec, message_format=form) for spec in own) for form in (x, delta))
    report = TensorSpec((2 + metrics,), torch.float64)
    returned, back = (returned, back) if trained else ((), ())
    return Boundary((streams,), (returned if returns_activations(keep) else (), back, (report,)))
