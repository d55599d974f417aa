"""Worker of a stage: receives, computes, sends and updates for each microbatch, as in Algorithm 1 of PETRA."""

from __future__ import annotations

from collections import deque

from petra.engine.endpoints import Objective
from petra.engine.stage import Stage
from petra.engine.update import Update
from petra.hooks import Hooks
from petra.specs import Message, in_own_memory
from petra.transport import Port


class Worker:
    """Runs one stage between its two neighbours.

    Stage j, counted from 1, maps x_(j−1) to x_j; δ_j is the gradient with respect to its input x_(j−1). A report, the loss and
    metrics of a microbatch, travels with the gradients from the last stage to the first.

    Args:
        index: Number of the stage, from 0.
        upstream: Port that delivers x_(j−1) and accepts (x̃_(j−1), δ_j); the data source for the first stage.
        downstream: Port that accepts x_j and delivers (x̃_j, δ_(j+1)); the loss for the last stage.
        update: Updates the stage's weights every k microbatches.
        shrink: Factor of the gradient sent upstream (gradient shrinking, :class:`petra.staleness.Remedy`).
        hooks: Hooks that observe training; evaluation emits no events.
        lag: With split backward passes, the second part of a microbatch follows the first part of ``lag`` microbatches later.

    Attributes:
        t: Number of microbatches whose backward this stage has finished.
    """

    def __init__(
        self,
        index: int,
        stage: Stage,
        upstream: Port,
        downstream: Port,
        update: Update,
        hooks: Hooks,
        shrink: float = 1.0,
        lag: int = 0,
    ) -> None:
        self.index, self.stage, self.upstream, self.downstream = index, stage, upstream, downstream
        self.update, self.hooks, self.shrink = update, hooks, shrink
        self.lag, self._unfinished = lag, deque[int]()  # microbatches whose gradients of the parameters are missing
        self.t = 0

    def begin_run(self) -> None:
        """Prepare for a run of training.

        Raises:
            ModelError: If a parameter was frozen or unfrozen since the pipeline was built.
        """
        self.stage.gradients.check_trained(self.index + 1)
        for runner in self.stage.runners:
            runner.function.begin_run()

    def forward(self, m: int) -> None:
        """Receive x_(j−1), run the stage, and send x_j."""
        (x,) = self._receive(self.upstream, self.index - 1, m)
        for call in self.hooks.forward_begin:
            call(self.index, m, x)
        y = self.stage.forward(m, x)
        for call in self.hooks.forward_end:
            call(self.index, m, y)
        self._send(self.downstream, self.index + 1, m, (y,))

    def backward(self, m: int) -> None:
        """Receive (x̃_j, δ_(j+1), report), run the stage backward, send (x̃_(j−1), δ_j, report), and update every k microbatches.

        If the stage splits its backward passes, :meth:`backward_weights` has to follow, which updates.
        """
        self.propagate(m)
        if self.stage.split:
            self._unfinished.append(m)
        else:
            self.count_and_update()

    def propagate(self, m: int) -> None:
        """Do the part of :meth:`backward` that leaves the weights as they are. :meth:`count_and_update` must follow."""
        y, delta, (report,) = self._receive(self.downstream, self.index + 1, m)
        delta = self.update.scaled(delta)
        for before in self.hooks.backward_begin:
            before(self.index, m, y, delta)
        x, delta = self.stage.backward(m, y, delta)  # Δ ← Δ + gradient / k
        for after in self.hooks.backward_end:
            after(self.index, m, x, delta)
        delta = self.update.unscaled(delta)
        if self.shrink != 1:
            delta = tuple(d * self.shrink for d in delta)
        self._send(self.upstream, self.index - 1, m, (x, delta, (in_own_memory(report),)))

    def backward_weights(self, m: int) -> None:
        """Compute the gradients of the parameters that are due after the first part of the backward pass of microbatch ``m``.

        All are due before an update, and the others after ``lag`` further microbatches (ZB-H1 in Qi et al. 2024).
        """
        self._finish_until(m if (m + 1) % self.stage.k == 0 else m - self.lag)

    def drain(self) -> None:
        """Compute all gradients of the parameters that are missing."""
        if self._unfinished:
            self._finish_until(self._unfinished[-1])

    def _finish_until(self, last: int) -> None:
        while self._unfinished and self._unfinished[0] <= last:
            m = self._unfinished.popleft()
            for begin in self.hooks.backward_weights_begin:
                begin(self.index, m)
            self.stage.backward_weights(m)
            for end in self.hooks.backward_weights_end:
                end(self.index, m)
            self.count_and_update()

    def count_and_update(self) -> None:
        """Count a microbatch whose backward has run, and update every k microbatches."""
        self.t += 1
        if self.t % self.stage.k == 0:
            self.update(self.t)

    def evaluate(self, m: int) -> None:
        """Receive x_(j−1) of an evaluation microbatch, run the stage without storing anything, and send x_j."""
        (x,) = self.upstream.receive(m)
        y = self.stage.evaluate(x)
        if isinstance(self.downstream, Objective):
            self.downstream.evaluate(m, (y,))
        else:
            self.downstream.send(m, (y,))

    def _receive(self, port: Port, peer: int, m: int) -> Message:
        for begin in self.hooks.receive_begin:
            begin(self.index, peer, m)
        message = port.receive(m)
        for end in self.hooks.receive_end:
            end(self.index, peer, m, message)
        return message

    def _send(self, port: Port, peer: int, m: int, message: Message) -> None:
        for begin in self.hooks.send_begin:
            begin(self.index, peer, m, message)
        port.send(m, message)
        for end in self.hooks.send_end:
            end(self.index, peer, m, message)
