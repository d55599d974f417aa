"""State of a stage between updates, apart from its weights: tensors by kind and parameter, and numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from zlib import crc32

import torch

from petra.engine.options.loss_scale import LossScale
from petra.engine.options.optimizer_state import Kinds, load_optimizer, parts_of
from petra.engine.update import OptimizerStep
from petra.engine.worker import Worker


def kinds_of(worker: Worker) -> Kinds:
    """Return all tensors of a stage that belong to a parameter or a running statistic, apart from its weights and buffers."""
    kinds: Kinds = defaultdict(dict)
    scale = worker.update.part(LossScale)
    for p in worker.stage.gradients.parameters:
        assert p.grad is not None
        kinds["gradient"][p] = p.grad if scale is None else (p.grad / scale.scale).to(p.grad.dtype)
    if worker.update.optimizer is not None:
        for parameter, values in worker.update.optimizer.state.items():
            for kind, value in values.items():
                for name, tensor in parts_of(kind, value).items():
                    kinds[f"optimizer/{name}"][parameter] = tensor
    kinds["method/previous"] |= worker.stage.previous()
    for part in worker.update.parts:
        for kind, tensors in part.tensors().items():
            kinds[kind] |= tensors
    return kinds


def numbers_of(worker: Worker) -> dict[str, float]:
    """Return the numbers of a stage's updates by name."""
    numbers: dict[str, float] = {"done": worker.update.done, "t": worker.update.last_t}
    if worker.update.optimizer is not None:
        numbers["optimizer"] = code_of(worker.update.optimizer)
    for part in worker.update.parts:
        numbers |= part.numbers()
    return {key: float(n) for key, n in numbers.items()}


def code_of(optimizer: torch.optim.Optimizer) -> float:
    """Return a number for the class of an optimizer."""
    return float(crc32(type(optimizer).__name__.encode()))


@torch.no_grad()
def load_kinds(worker: Worker, kinds: Kinds, numbers: Mapping[str, float], clock: int) -> None:
    """Restore what :func:`kinds_of` and :func:`numbers_of` returned after ``clock`` microbatches. Weights have been loaded."""
    update, worker.microbatches_done = worker.update, clock
    update.done, update.last_t = int(numbers["done"]), int(numbers["t"])
    for part in update.parts:
        part.load(numbers)
    step, scale = update[OptimizerStep], update.part(LossScale)
    if step.optimizer is not None:
        load_optimizer(step.optimizer, kinds)
        if update.last_t:
            step.set_learning_rate(update.last_t)  # weight prediction reads it before the next update
    for p in worker.stage.gradients.parameters:
        assert p.grad is not None
        gradient = kinds["gradient"][p].to(p.grad)
        p.grad.copy_(gradient if scale is None else gradient * scale.scale)
    worker.stage.gradients.restore_used()
    worker.stage.resume(clock // worker.stage.gradients.k, kinds["method/previous"])
    for part in update.parts:
        part.resume(kinds)
