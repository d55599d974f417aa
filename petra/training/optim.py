"""The optimizer of one stage."""

from __future__ import annotations

import torch
from torch import nn


def sgd(module: nn.Module, *, momentum: float = 0.9, nesterov: bool = True, weight_decay: float = 5e-4) -> torch.optim.SGD:
    """Stochastic gradient descent that decays weights but neither biases nor normalisation (Goyal et al. 2017, section 5.3).

    These are the parameters of one dimension. The learning rate is to be set before each step.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    # One kernel for each group instead of several for each parameter; the same numbers to the last bit.
    return torch.optim.SGD([g for g in groups if g["params"]], lr=0.0, momentum=momentum, nesterov=nesterov, fused=True)
