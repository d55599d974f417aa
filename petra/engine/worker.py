"""Worker of a stage: receives, computes, sends and updates for each microbatch, as in Algorithm 1 of PETRA."""

from __future__ import annotations

from petra.engine.stage import Stage
from petra.engine.update import Update
from petra.transport import Port


class Worker:
    """Runs one stage between its two neighbours.

    Stage j, counted from 1, maps x_(j−1) to x_j; δ_j is the gradient with respect to its input x_(j−1). A report, the loss and
    metrics of a microbatch, travels with the gradients from the last stage to the first.

    Args:
        index: Index of the stage, from 0.
        upstream: Port that delivers x_(j−1) and accepts (x̃_(j−1), δ_j); the data source for the first stage.
        downstream: Port that accepts x_j and delivers (x̃_j, δ_(j+1)); the loss for the last stage.
        update: Updates the stage's weights every k microbatches.

    Attributes:
        microbatches_done: Number of microbatches whose backward this stage has finished: t in Algorithm 1.
    """

    def __init__(self, index: int, stage: Stage, upstream: Port, downstream: Port, update: Update) -> None:
        self.index, self.stage, self.upstream, self.downstream, self.update = index, stage, upstream, downstream, update
        self.microbatches_done = 0

    def forward(self, m: int) -> None:
        """Receive x_(j−1), run the stage, and send x_j."""
        (x,) = self.upstream.receive(m)
        self.downstream.send(m, (self.stage.forward(m, x),))

    def backward(self, m: int) -> None:
        """Receive (x̃_j, δ_(j+1), report), run the stage backward, send (x̃_(j−1), δ_j, report), and update every k microbatches."""
        y, delta, report = self.downstream.receive(m)
        x, delta = self.stage.backward(m, y, delta)  # Δ ← Δ + gradient / k
        self.upstream.send(m, (x, delta, report))
        self.microbatches_done += 1
        if self.microbatches_done % self.stage.gradients.k == 0:
            self.update(self.microbatches_done)

    def evaluate(self, m: int) -> None:
        """Receive x_(j−1) of an evaluation microbatch, run the stage without storing anything, and send x_j."""
        (x,) = self.upstream.receive(m)
        self.downstream.send(m, (self.stage.evaluate(x),))
