"""Algorithm 1 of PETRA: what one stage does with each microbatch."""

from __future__ import annotations

from petra.engine.endpoints import Objective
from petra.engine.stage import Stage
from petra.engine.update import Update
from petra.plan.schedule import Op
from petra.transport import Port


class Worker:
    """One stage at work between its two neighbours.

    Args:
        upstream: sends x_(j−1) and takes (x̃_(j−1), δ_j) back; the data, for the first stage.
        downstream: takes x_j and sends (x̃_j, δ_(j+1)) back; the loss, for the last stage.
        update: what happens to the stage's weights every k microbatches.
        shrink: factor of the δ sent upstream (gradient shrinking, :class:`petra.staleness.Remedy`).
    """

    def __init__(self, stage: Stage, upstream: Port, downstream: Port, update: Update, shrink: float = 1.0) -> None:
        self.stage, self.upstream, self.downstream, self.update, self.shrink = stage, upstream, downstream, update, shrink
        self.t = 0
        """Microbatches gone backward: the stage's clock."""

    def do(self, op: Op, m: int) -> None:
        try:
            self.forward(m) if op is Op.FORWARD else self.backward(m)
        except Exception as error:
            self._locate(error, m, op.name.lower())
            raise

    def forward(self, m: int) -> None:
        (x,) = self.upstream.receive(m)
        self.downstream.send(m, (self.stage.forward(m, x),))

    def backward(self, m: int) -> None:
        y, delta, (report,) = self.downstream.receive(m)
        x, delta = self.stage.backward(m, y, self.update.scaled(delta))  # Δ ← Δ + gradient / k
        delta = self.update.unscaled(delta)
        if self.shrink != 1:
            delta = tuple(d * self.shrink for d in delta)
        self.upstream.send(m, (x, delta, (report.clone(),)))  # a received one is part of the whole message
        self.t += 1
        if self.t % self.stage.k == 0:
            self.update(self.t)

    def evaluate(self, m: int) -> None:
        try:
            (x,) = self.upstream.receive(m)
            y = self.stage.evaluate(x)
            if isinstance(self.downstream, Objective):
                self.downstream.evaluate(m, (y,))
            else:
                self.downstream.send(m, (y,))
        except Exception as error:
            self._locate(error, m, "evaluation")
            raise

    def _locate(self, error: Exception, m: int, operation: str) -> None:
        error.add_note(f"in stage {self.update.number}, microbatch {m}, {operation}")
