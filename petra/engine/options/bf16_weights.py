"""Weights in bfloat16, with master weights in float32 or an optimizer that rounds stochastically.

Parameters of two or more dimensions become bfloat16, in which blocks compute under autocast. Biases and normalisation stay in
float32, and so do all gradients, which are sums over k microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from petra.engine.options.optimizer_state import MASTER
from petra.engine.stage import Stage
from petra.engine.update import Part
from petra.errors import require


def attach_masters(stage: Stage, optimizer: torch.optim.Optimizer | None) -> list[Part]:
    """Convert a stage's weights, and return the part that has their masters, which are the initial weights unrounded."""
    masters = [] if optimizer is None else [MasterWeights(optimizer)]
    shorten(stage)
    return [*masters]


def shorten(stage: Stage) -> None:
    """Convert a stage's parameters of two or more dimensions from float32 to bfloat16. Gradients stay in float32."""
    for p in stage.module.parameters():
        require(p.dtype is not torch.float64, "optim.weights", "float32 with parameters in float64", "bf16")
        if p.dim() > 1 and p.dtype is torch.float32:
            p.data = p.data.bfloat16()
            if p.requires_grad:
                p.grad_dtype = torch.float32


class MasterWeights(Part):
    """Gives parameters their float32 values during each step of the optimizer, and rounds them to bfloat16 after it.

    Between steps, the master weights are states of the optimizer. So they are saved, divided over replicas and counted as these
    are. An optimizer with a true attribute ``bf16_stochastic_round``, such as torchao's, has none: it gets the weights in bfloat16.

    Args:
        optimizer: Optimizer of a stage, before or after :func:`shorten`. Before it, the masters are the initial weights unrounded.

    Raises:
        ConfigError: If the optimizer has weights of its own for evaluation.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._short = optimizer, dict[Tensor, Tensor]()
        name = type(optimizer).__name__
        require(not hasattr(optimizer, "eval"), "optim.weights", f"float32 with {name}, which trains other weights", "bf16")
        self._rounds = not getattr(optimizer, "bf16_stochastic_round", False)
        if self._rounds:
            for state in optimizer.state.values():
                state |= {kind: value.float() for kind, value in state.items() if value.dtype is torch.bfloat16}
            self.resume({})
            optimizer.register_step_pre_hook(self._lengthen)
            optimizer.register_step_post_hook(self._shorten)

    def resume(self, tensors: Mapping[str, Mapping[Tensor, Tensor]]) -> None:
        """Start from the weights, except where a checkpoint had master weights, which the optimizer has loaded."""
        loaded = tensors.get(f"optimizer/{MASTER}", {})
        for p in (p for group in self._optimizer.param_groups for p in group["params"]) if self._rounds else ():
            if p.dim() > 1 and p.dtype in (torch.float32, torch.bfloat16) and p not in loaded:
                self._optimizer.state[p][MASTER] = p.detach().float()

    @torch.no_grad()
    def _lengthen(self, *_: Any) -> None:
        for p, state in self._optimizer.state.items():
            if MASTER in state:
                self._short[p], p.data = p.data, state.pop(MASTER)

    @torch.no_grad()
    def _shorten(self, *_: Any) -> None:
        for p, short in self._short.items():
            self._optimizer.state[p][MASTER] = p.data
            p.data = short.copy_(p.data)
        self._short.clear()
