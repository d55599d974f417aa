"""Hooks of parameters: called once per update, with the accumulated gradient, and not by autograd at each backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from petra.engine.options.loss_scale import LossScale
from petra.engine.update import GradientNorm, OptimizerStep, Part, Pending
from petra.engine.worker import Worker
from petra.errors import ModelError, require
from petra.torch_private import Hook, hooks_of, take_hooks


def call_hooks_of(worker: Worker) -> None:
    """Call the hooks that the parameters of a worker have now at its updates from now on."""
    parts = worker.update.parts
    if worker.update.part(ParameterHooks) is None:
        parts.insert(next(i for i, part in enumerate(parts) if isinstance(part, GradientNorm)), ParameterHooks(worker))
    worker.update[ParameterHooks].take()


class ParameterHooks(Part):
    """Calls the hooks of a stage's parameters.

    Hooks of ``register_hook`` get the gradient of an update, without loss scale; what they return replaces it. Hooks of
    ``register_post_accumulate_grad_hook`` are called before the optimizer's step, and may set ``.grad`` to None.
    """

    def __init__(self, worker: Worker) -> None:
        self._gradients, self._scale = worker.stage.gradients, worker.update.part(LossScale)
        self._taken: dict[nn.Parameter, list[Mapping[int, Hook]]] = {}
        self._kept: list[tuple[nn.Parameter, Tensor | None]] = []
        step = worker.update[OptimizerStep]
        step.reads_skip = True
        if step.optimizer is not None:
            step.optimizer.register_step_pre_hook(self._call_late)
            step.optimizer.register_step_post_hook(self._restore)

    def take(self) -> None:
        """Take over new hooks of ``register_hook``."""
        for parameter in self._gradients.parameters:
            if found := take_hooks(parameter):
                self._taken.setdefault(parameter, []).append(found)

    @torch.no_grad()
    def run(self, pending: Pending) -> None:
        """Call the hooks of ``register_hook``.

        Raises:
            ModelError: If a hook returns anything but None or a gradient.
        """
        scale = None if self._scale is None else self._scale.scale
        for parameter, taken in self._taken.items():
            if not self._gradients.is_used(parameter):
                continue
            assert parameter.grad is not None
            gradient = parameter.grad if scale is None else parameter.grad / scale
            for hook in [hook for hooks in taken for hook in hooks.values()]:
                result = hook(gradient)
                if result is not None:
                    fits = isinstance(result, Tensor) and result.shape == gradient.shape
                    got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
                    name = next(name for name, p in self._gradients.module.named_parameters() if p is parameter)
                    expected = f"None or a gradient of shape {list(gradient.shape)}"
                    require(fits, f"hook of parameter {name}", expected, got, ModelError)
                    gradient = result
            parameter.grad.copy_(gradient if scale is None else gradient * scale)

    @torch.no_grad()
    def _call_late(self, *_: Any) -> None:
        self._kept = [(p, p.grad) for p in self._gradients.parameters if p.grad is not None and hooks_of(p)[1]]
        for parameter, _gradient in self._kept:
            for hook in hooks_of(parameter)[1]:
                hook(parameter)

    def _restore(self, *_: Any) -> None:
        for parameter, gradient in self._kept:
            parameter.grad = gradient
