"""One stage: consecutive blocks of a model, and the gradients that they accumulate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from petra.engine.accumulation import Accumulation
from petra.engine.block import BlockRunner
from petra.engine.weights import WeightVersion
from petra.reversible.replay import NOTHING
from petra.specs import Streams, without_side


class Stage:
    """Consecutive blocks of a model with their gradients. A stage is independent of transport and schedule.

    Args:
        runners: Runners of its blocks (:mod:`petra.engine.build` makes them).
        gradients: The gradients that its blocks accumulate.
        returns_input: Whether the previous stage needs x̃, this stage's reconstructed or stored input, for its own backward pass.
        channels_last: Whether 4-d streams use the channels-last memory format.
    """

    has_backward = True

    def __init__(
        self, runners: Sequence[BlockRunner], gradients: Accumulation, *, returns_input: bool = True, channels_last: bool = False
    ) -> None:
        self.runners, self.gradients, self.module = list(runners), gradients, gradients.module
        self.returns_input, self.channels_last = returns_input, channels_last

    def begin_run(self, number: int) -> None:
        """Prepare for a run of training.

        Args:
            number: Number of the stage, from 1, for messages.

        Raises:
            ModelError: If a parameter was frozen or unfrozen since the pipeline was built.
        """
        self.gradients.check_trained(number)
        for runner in self.runners:
            runner.function.begin_run()

    def forward(self, m: int, x: Streams) -> Streams:
        """Run the forward pass of microbatch ``m`` and return the stage's output, detached."""
        if torch.is_grad_enabled():  # blocks enable gradients where they need a graph
            with torch.no_grad():
                return self.forward(m, x)
        for runner in self.runners:
            x = self.contiguous(runner.forward(m, x))
        return x

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams]:
        """Run the backward pass of microbatch ``m``: add 1/k of the parameters' gradients to ``.grad``.

        Args:
            y: The stage's output, as the next stage stored or reconstructed it. Empty unless the last block reconstructs.
            dy: Gradient of the loss with respect to the output.

        Returns:
            The stage's input x̃ without side tensors (empty unless the previous stage needs it), and the gradient with respect to
            it.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.backward(m, y, dy)
        for i in range(len(self.runners) - 1, -1, -1):
            y, dy, gradients = self.runners[i].backward(m, y, dy)
            y, dy = self.contiguous(y), self.contiguous(dy)
            self.gradients.add(i, gradients)
            del gradients  # before the next block's backward allocates its own
        return without_side(y) if self.returns_input else (), dy

    def evaluate(self, x: Streams) -> Streams:
        """Run a forward pass for evaluation: with running statistics, and without storing anything."""
        for runner in self.runners:
            x = self.contiguous(runner.function.evaluate(x))
        return x

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Prepare for an optimizer step in the body of the ``with`` statement, and set the gradients to zero after it.

        Stored graphs of microbatches in flight refer to the weights that the step overwrites. Their backward passes then use old
        activations and new weights, as in PipeMare (Yang et al. 2021). Version counters are preserved, because autograd would
        otherwise refuse to differentiate these graphs.
        """
        graphs_in_flight = any(stored.outputs for runner in self.runners for stored in runner.stored.values())
        for runner in self.runners:
            runner.versions.before_update()
        unused = self.gradients.hide_unused()
        if graphs_in_flight:
            from petra.engine.options.stored_graphs import overwriting
        with overwriting(self.runners, tuple(self.gradients.parameters)) if graphs_in_flight else NOTHING:
            yield
        self.gradients.restore_and_zero(unused)

    def use_in_forward(self, weights: Mapping[Tensor, Tensor]) -> None:
        """Set the weights, by parameter, that forward passes use until the next update. Empty: the parameters themselves."""
        for runner in self.runners:
            runner.versions.predicted = _version(runner, weights)

    def use_in_backward(self, weights: Mapping[Tensor, Tensor]) -> None:
        """Set the weights, by parameter, that backward passes differentiate until the next update. Empty: the parameters."""
        for runner in self.runners:
            runner.versions.corrected = _version(runner, weights)

    def previous(self) -> dict[Tensor, Tensor]:
        """Return the older version of double weights by parameter; empty for other weights, and before the first update."""
        versions = [runner.versions for runner in self.runners]
        return {p: v.previous[name] for v in versions if v.previous is not None for name, p in v.parameters.items()}

    def resume(self, updates: int, previous: Mapping[Tensor, Tensor]) -> None:
        """Restore the state after ``updates`` updates, when :meth:`previous` returned ``previous``."""
        for runner in self.runners:
            names = runner.parameters.items() if previous else ()
            runner.versions.resume(updates, {name: previous[p].to(p, copy=True).requires_grad_() for name, p in names})

    def stored_bytes(self) -> int:
        """Return the size of the inputs that blocks store for all microbatches in flight."""
        return sum(t.nbytes for runner in self.runners for stored in list(runner.stored.values()) for t in stored.inputs)

    def contiguous(self, streams: Streams) -> Streams:
        """Return the streams in the stage's memory format. Results could otherwise depend on the partition."""
        kept = not self.channels_last and all(map(Tensor.is_contiguous, streams))
        return streams if kept else tuple(map(_channels_last if self.channels_last else Tensor.contiguous, streams))


def _version(runner: BlockRunner, weights: Mapping[Tensor, Tensor]) -> WeightVersion | None:
    return {name: weights[p].requires_grad_() for name, p in runner.parameters.items()} if weights else None


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor.contiguous()


@contextmanager
def evaluating(stages: Iterable[Stage]) -> Iterator[None]:
    """Set all modules to evaluation mode inside the ``with`` block. Layers that were in it before stay in it afterwards."""
    modules = [stage.module for stage in stages]
    frozen = [m for module in modules for m in module.modules() if not m.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()
        for m in frozen:
            m.training = False
