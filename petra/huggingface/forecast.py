"""What a training will need, in a line: the memory of each process, and a limit of the speed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra.cost_model.costs import count_blocks, pipeline_costs
from petra.cost_model.memory import predict_memory
from petra.cost_model.simulator import predict
from petra.engine.recipe import Recipe
from petra.errors import first_line
from petra.huggingface.optimizers import like
from petra.method import Keep
from petra.plan import Plan
from petra.specs import TensorSpec

SMALL = 10_000_000
"""Number of parameters below which memory is not predicted: that would take longer than some updates."""


def forecast(plan: Plan, recipe: Recipe, whole: torch.optim.Optimizer, kind: str, chunks: Any = None) -> str:
    """Return a line about the memory and the speed of a training, before it begins.

    The loss of a batch of logits is assumed to be the cross-entropy in float32. The speed of devices and links is not measured
    here, and the cost of updates and messages not counted, so that only a limit is known.

    Args:
        whole: Optimizer of the whole model.
        kind: Type of the devices.
        chunks: The loss (:class:`petra.models.head_loss.LinearCrossEntropy`) if it is computed without whole logits.
    """
    count = len(plan.layout.processes) * plan.layout.dp
    blocks = count_blocks(plan.model, plan.layout.inputs, plan.numerics)
    costs = pipeline_costs([[blocks[b] for b in stage.blocks] for stage in plan.stages], [stage.keeps for stage in plan.stages])
    found = predict(costs, plan.method, plan.k, processes=[owned for owned in plan.layout.processes if owned])
    if count == 1:
        return f"predicted memory: {_memory(plan, recipe, whole, kind, chunks)}; speed: unknown, as nothing is measured"
    single = pipeline_costs([[block] for block in blocks], [[Keep.GRAPH]] * len(blocks))
    most = plan.layout.dp * sum(cost.forward + cost.backward for cost in single) / found.period
    speed = f"speed: unknown, as nothing is measured; by FLOPs, at most {most:.3g} times one process's in {count}"
    return f"predicted memory: {_memory(plan, recipe, whole, kind, chunks)}; {speed}"


def _memory(plan: Plan, recipe: Recipe, whole: torch.optim.Optimizer, kind: str, chunks: Any) -> str:
    if sum(profile.parameters for profile in plan.layout.profiles) < SMALL:
        return f"none for fewer than {SMALL // 1_000_000} million parameters"

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return like(whole, [[p for p in module.parameters() if p.requires_grad]])

    recipe = replace(recipe, optimizer=optimizer, loss=_Loss(chunks))
    try:
        found = predict_memory(plan, recipe, TensorSpec((1,), torch.int64), device_type=kind)
    except Exception as error:  # of a layer or an optimizer that reads values; the training may go well
        return f"unknown ({first_line(error)})"
    sizes = ", ".join(f"{(each.tensors if kind == 'cpu' else each.total) / 1e9:.3g}" for each in found)
    return f"{sizes} GB in process{'es' * (len(found) > 1)} {' to '.join(sorted({'0', str(len(found) - 1)}))}"


class _Loss:
    """Loss that reads no values. Its targets are zeros."""

    outputs, mean_over_targets = (2, 3, 4), True

    def __init__(self, chunks: Any) -> None:
        self._chunks = chunks

    def __call__(self, first: Tensor, *rest: Tensor) -> Tensor:
        *weights, _, _ = rest
        targets = torch.zeros(len(first), dtype=torch.int64, device=first.device)
        if self._chunks is None:
            return F.cross_entropy(first.float(), targets)
        loss: Tensor = self._chunks(first, *weights, targets)
        return loss
