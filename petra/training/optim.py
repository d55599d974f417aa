"""The optimizer of one stage. All of them spare biases and normalisation, the parameters of one dimension, from weight decay
(Goyal et al. 2017, section 5.3), and expect the learning rate to be set before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from petra.training.lars import LARS


def sgd(module: nn.Module, *, momentum: float = 0.9, nesterov: bool = True, weight_decay: float = 5e-4) -> torch.optim.SGD:
    """Stochastic gradient descent with momentum."""
    # One kernel for each group instead of several for each parameter; the same numbers to the last bit.
    optimizer = torch.optim.SGD(_groups(module, weight_decay), lr=0.0, momentum=momentum, nesterov=nesterov, fused=True)
    if momentum:
        # Zeros give the first step's numbers. Torch's own first buffer is uninitialised memory if that step is skipped on the GPU.
        for p in _trained(module):
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer


def lars(module: nn.Module, *, momentum: float = 0.9, trust: float = 0.001, weight_decay: float = 5e-4) -> LARS:
    """Layer-wise adaptive rates for large batches; biases and normalisation are stepped as by SGD."""
    return LARS(_groups(module, weight_decay), momentum=momentum, trust=trust)


def adam(
    module: nn.Module, *, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> torch.optim.Adam:
    """Adam; its weight decay is a part of the gradient (Kingma, Ba 2015)."""
    return torch.optim.Adam(_groups(module, weight_decay), lr=0.0, betas=_pair(betas), eps=eps, fused=True)


def adamw(
    module: nn.Module, *, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
) -> torch.optim.AdamW:
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019)."""
    return torch.optim.AdamW(_groups(module, weight_decay), lr=0.0, betas=_pair(betas), eps=eps, fused=True)


class Muon(torch.optim.Optimizer):
    """Muon for matrices and AdamW for all the rest, under one learning rate and one weight decay.

    torch's Muon takes matrices only, and its updates are scaled to the root mean square of AdamW's (Liu et al. 2025, section 2.2),
    so that one rate serves both. The weights of linear layers are matrices; those of convolutions and embeddings are not.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
        matrices = [p for p in _trained(module) if p.dim() == 2 and id(p) not in tables]
        chosen = {id(p) for p in matrices}
        rest = [p for p in _trained(module) if id(p) not in chosen]
        self._parts: list[tuple[torch.optim.Optimizer, int]] = []
        groups: list[dict[str, Any]] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                lr=0.0,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                adjust_lr_fn="match_rms_adamw",
            )
            self._parts.append((muon, 1))
            groups += muon.param_groups
        if rest:
            other = torch.optim.AdamW(_split(rest, weight_decay), lr=0.0, betas=_pair(betas), eps=eps, fused=True)
            self._parts.append((other, len(other.param_groups)))
            groups += other.param_groups
        super().__init__(groups, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of both; their groups and state are this optimizer's, also after it has loaded a state."""
        start = 0
        for part, count in self._parts:
            part.param_groups, part.state = self.param_groups[start : start + count], self.state
            part.step()
            start += count


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": sgd,
    "lars": lars,
    "adam": adam,
    "adamw": adamw,
    "muon": Muon,
}
"""By name: from a stage's blocks, and settings, to their optimizer."""


def _trained(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    return _split(_trained(module), weight_decay)


def _split(parameters: Sequence[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def _pair(betas: Sequence[float]) -> tuple[float, float]:
    first, second = betas
    return first, second
