"""A metric that only some data have."""

from __future__ import annotations

from torch import Tensor

from petra.engine.metrics import require_classes


def top5_correct(output: Tensor, targets: Tensor) -> Tensor:
    """Return the number of targets among the five highest scores. Classes are dimension 1 of the output, and more than five.

    Raises:
        ModelError: If the targets are not integers.
    """
    require_classes("top5", targets)
    return (output.topk(5, 1).indices == targets.unsqueeze(1)).sum()
