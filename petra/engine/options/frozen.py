"""Stages before the first trained parameter of a model, such as one that is fine-tuned: they only run forward."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from petra.engine.stage import Stage
from petra.plan import Plan
from petra.specs import Streams


class ForwardStage(Stage):
    """Stage without a trained parameter in it or before it. It stores nothing, and receives and sends no gradient."""

    has_backward = False

    def forward(self, m: int, x: Streams) -> Streams:
        """Run the forward pass of microbatch ``m`` and return the stage's output. Running statistics move once."""
        with torch.no_grad():
            for runner in self.runners:
                x = self.contiguous(runner.function(m, x, None))
        return x

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams]:
        """Return nothing."""
        return (), ()


class FirstTrainedStage(Stage):
    """Stage with the first trained parameters. Its backward pass returns nothing to the stage before it."""

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams]:
        """Run the backward pass of microbatch ``m``, as :meth:`petra.engine.stage.Stage.backward` does, and return nothing."""
        super().backward(m, y, dy)
        return (), ()


def without_gradients(stages: Mapping[int, Stage], plan: Plan) -> dict[int, Stage]:
    """Return the stages of a rank, by index, as those that send and receive only the gradients that their boundaries carry."""
    carried = [boundary.backward_bytes > 0 for boundary in plan.boundaries]
    found = {}
    for j, stage in stages.items():
        kind = ForwardStage if not all(carried[j : j + 1]) else Stage if all(carried[max(j - 1, 0) : j]) else FirstTrainedStage
        found[j] = kind(stage.runners, stage.gradients, returns_input=stage.returns_input, channels_last=stage.channels_last)
    return found
