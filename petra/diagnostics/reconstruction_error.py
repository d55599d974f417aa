"""Measures the error of reconstructed inputs while a pipeline trains.

A reversible block that stores nothing reconstructs its input from its output. Two effects make the reconstruction inexact:
floating-point sums round (RevNet, section 3.2), and under an asynchronous method the weights have changed since the forward
(PETRA, section 3.3). Both errors accumulate from block to block towards the first stage.
"""

from __future__ import annotations

import logging

from petra.diagnostics.weight_drift import distance, norm
from petra.errors import require
from petra.hooks import Gradients, Hook
from petra.method import Keep
from petra.pipeline import Pipeline
from petra.specs import Streams, without_side

log = logging.getLogger(__name__)

EVERY = 200
"""About the number of microbatches between two measurements. For a measurement each stage keeps one sample of its input."""


class ReconstructionMonitor(Hook):
    """Print a warning, once for each stage of this process, if a reconstructed input is too far from the true one.

    About every :data:`EVERY` microbatches, take the first sample of the input of each run of blocks that store nothing, and compare
    it with its reconstruction: ‖x̃ − x‖ / ‖x‖ over both streams, without side tensors. The training result does not change by a bit.
    The host waits for the device only at these measurements.

    Args:
        limit: Relative error above which to warn.

    Attributes:
        errors: For each stage (from 0) with such blocks, the error last measured.
        blocks: Indices of the blocks whose inputs are compared: the first of each run, whose input is the last to be reconstructed.

    Raises:
        ConfigError: If ``limit`` is not above 0.
    """

    def __init__(self, pipeline: Pipeline, limit: float = 0.5) -> None:
        require(limit > 0, "limit", "a number > 0", limit)
        self.pipeline, self.limit, self._every = pipeline, limit, distance(pipeline.plan.k, -(-EVERY // pipeline.plan.k))
        self.errors: dict[int, float] = {}
        self.blocks: set[int] = set()
        for j, stage in pipeline.stages.items():
            stores = [runner.keep is not Keep.NOTHING for runner in stage.runners]
            rows = zip(pipeline.plan.layout.stages[j], [True, *stores], stores, strict=False)
            self.blocks |= {block for block, before, own in rows if before and not own}
        self._inputs: dict[tuple[int, int], Streams] = {}
        self._warned: set[int] = set()

    def block_forward_begin(self, stage: int, block: int, m: int, x: Streams) -> None:
        if (m + 1) % self._every == 0 and block in self.blocks:
            self._inputs[block, m] = tuple(t[:1].clone() for t in without_side(x))

    def block_backward_end(self, stage: int, block: int, m: int, x: Streams, gradients: Gradients) -> None:
        if (true := self._inputs.pop((block, m), None)) is None:
            return
        difference = [a[:1].double() - b.double() for a, b in zip(without_side(x), true, strict=True)]
        error = self.errors[stage] = (norm(difference) / norm(true)).item()
        if error > self.limit and stage not in self._warned:
            self._warned.add(stage)
            log.warning(self._text(stage, m, error))

    def _text(self, j: int, m: int, error: float) -> str:
        pipeline, numerics = self.pipeline, self.pipeline.plan.numerics
        remedies = ["a smaller optim.lr, a larger k or a smaller method.delay"] if pipeline.plan.stages[j].staleness else []
        remedies += ["trainer.precision=float32"] if numerics.autocast is not None else []
        remedies += ["trainer.message_format=null"] if numerics.message_format is not None else []
        remedies += ["trainer.exact_streams=true"] if not numerics.exact_streams and numerics.message_format is None else []
        remedies += ["method.keep=input"]
        return (
            f"stage {j + 1}, microbatch {m}: the relative error of the reconstructed input is {error:.2g}, above "
            f"{self.limit:g}; to reduce it, try {', or '.join(remedies)}"
        )
