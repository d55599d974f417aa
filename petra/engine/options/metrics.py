"""Metrics and losses that only some data have: of the five highest scores, and of several rows per sample."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from petra.engine.metrics import Metric, require_classes


def top5_correct(output: Tensor, targets: Tensor) -> Tensor:
    """Return the number of targets among the five highest scores. Classes are dimension 1 of the output, and more than five.

    Raises:
        ModelError: If the targets are not integers.
    """
    require_classes("top5", targets)
    return (output.topk(5, 1).indices == targets.unsqueeze(1)).sum()


@dataclass(frozen=True)
class MeanOutput:
    """A loss or a metric of mean outputs, for samples that have several rows of a microbatch, such as ten crops of an image.

    Attributes:
        function: Function of (output, targets).
        rows: Number of consecutive rows of a sample. The first has its target, and the others are ignored.
    """

    function: Metric
    rows: int

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the function of the mean outputs of the samples."""
        return self.function(output.view(-1, self.rows, *output.shape[1:]).mean(1), targets[:: self.rows])
