"""State of a stage's updates for checkpoints: numbers of the stage, and tensors of its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from petra.engine.options.averaging import WeightAverage
from petra.engine.options.loss_scale import LossScale
from petra.engine.stage import Stage
from petra.engine.update import Step, Update


def update_state(stage: Stage, update: Update) -> dict[str, Any]:
    """Return the state for a checkpoint.

    Returns:
        ``stage``: numbers of the stage. ``blocks``: for each block, by parameter name, the ``optimizer`` state, the moving
        ``average`` and the accumulated ``gradient``, unscaled.
    """
    numbers: dict[str, Any] = {"done": update.done, "t": update.microbatches_done}
    for part in update.parts:
        numbers |= part.numbers()
    scale, optimizer = _scale(update), update.optimizer
    averaging = update.part(WeightAverage)
    averages = iter(() if averaging is None else averaging.values)
    blocks = []
    for block in _blocks(stage):
        gradients = {n: p.grad for n, p in block.items() if p.grad is not None}
        blocks.append(
            {
                "optimizer": {n: dict(optimizer.state[p]) for n, p in block.items()} if optimizer else {},
                "average": {} if averaging is None else {n: next(averages) for n in block},
                "gradient": gradients if scale is None else {n: (g / scale).to(g.dtype) for n, g in gradients.items()},
            }
        )
    return {"stage": {key: v.item() if isinstance(v, Tensor) else v for key, v in numbers.items()}, "blocks": blocks}


@torch.no_grad()
def load_update_state(stage: Stage, update: Update, state: Mapping[str, Any]) -> None:
    """Restore an :func:`update_state` of the same blocks. Weights are not part of it."""
    numbers, blocks = state["stage"], _blocks(stage)
    scale = update.part(LossScale)
    if scale is not None:
        scale.load(numbers)  # the gradients below are multiplied by it
    update.done, update.microbatches_done = int(numbers["done"]), int(numbers["t"])
    named = [(n, p, saved) for block, saved in zip(blocks, state["blocks"], strict=True) for n, p in block.items()]
    step = update.part(Step)
    if step is not None and step.optimizer is not None:
        _load_optimizer(step.optimizer, {p: saved["optimizer"][n] for n, p, saved in named})
        if update.microbatches_done:
            step.set_learning_rate(update.microbatches_done)  # weight prediction reads it before the next update
    averaging = update.part(WeightAverage)
    if averaging is not None:
        for average, (n, _, saved) in zip(averaging.values, named, strict=True):
            if n in saved["average"]:  # otherwise the average begins with the weights
                average.copy_(saved["average"][n])
    for n, parameter, saved in named:
        assert parameter.grad is not None
        gradient = saved["gradient"][n].to(parameter.grad)
        parameter.grad.copy_(gradient if scale is None else gradient * scale.scale)
    stage.gradients.restore_used()
    for part in update.parts:
        part.load(numbers)


def _blocks(stage: Stage) -> list[dict[str, Any]]:
    return [{n: p for n, p in block.named_parameters() if p.requires_grad} for block in stage.module]


def _scale(update: Update) -> Tensor | None:
    part = update.part(LossScale)
    return None if part is None else part.scale


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[Tensor, Any]) -> None:
    """Restore an optimizer's state from that of each parameter.

    torch converts states to the type and device of the parameter, also numbers such as NAdam's product of momenta. The optimizer
    keeps these in float32 on the CPU, and would otherwise round differently and wait for the GPU at each step.
    """
    packed = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    packed["state"] = {i: saved[p] for i, p in enumerate(order) if saved[p]}
    optimizer.load_state_dict(packed)
    for p in order:
        numbers = {n: v for n, v in saved[p].items() if n != "step" and isinstance(v, Tensor) and v.dim() == 0 < p.dim()}
        optimizer.state[p].update({name: value.clone() for name, value in numbers.items()})
