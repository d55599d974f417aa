"""Blocks of a model of ``transformers`` compute what the model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from petra import Pipeline, TensorSpec
from tests.support.nets import make_pipeline

pytest.importorskip("transformers")

from petra.huggingface import from_pretrained, stack
from tests.huggingface.models import SETTINGS, batch_of, reference, tiny


class Keeping(torch.optim.SGD):
    """Optimizer that keeps the gradients of its last step, and changes no weight."""

    def step(self, closure: Any = None) -> None:
        self.found = {p: p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None}


class Batch:
    """One microbatch."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = lambda m: inputs, lambda m: targets


def gradients(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return the gradients of the last update by the names of the parameters."""
    optimizers = [worker.update.optimizer for worker in pipeline.workers.values()]
    found = {p: g for optimizer in optimizers if optimizer is not None for p, g in optimizer.found.items()}
    named = [(f"{name}.{key}", p) for name, block in pipeline.blocks() for key, p in block.named_parameters()]
    return {key: found[p] for key, p in named if p in found}


def trained(model: Any, inputs: Tensor, targets: Tensor, method: str, **settings: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return logits, loss and gradients of one microbatch in a pipeline of one block per stage."""
    converted = from_pretrained(model, **settings)
    spec = TensorSpec(tuple(inputs.shape), inputs.dtype)
    pipeline = make_pipeline(converted, spec, optimizer=lambda m: Keeping(m.parameters(), lr=0.0), method=method)
    logits = converted.build(0)(inputs).detach()
    loss = pipeline.train(Batch(inputs, targets), 1).loss
    return logits, torch.tensor(loss, dtype=logits.dtype), gradients(pipeline)


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_loss_and_gradients_equal_those_of_the_model(name: str) -> None:
    for dtype, method, tolerance in ((torch.float64, "petra", 1e-10), (torch.float32, "1f1b", 1e-5)):
        model = tiny(name, dtype)
        batch, targets = batch_of(name, 1, dtype=dtype)
        inputs = batch["pixel_values"] if "pixel_values" in batch else stack(batch)
        found, expected = trained(model, inputs, targets, method), reference(model, batch, targets)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert found[2]
