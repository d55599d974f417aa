"""NAdam, the optimizer of Ajanthan et al.'s asynchronous pipelines: Adam with Nesterov momentum that grows during training.

    μ_t = β1·(1 − 0.5·0.96^(t·ψ)),    M_t = μ_1·…·μ_t
    m ← β1·m + (1 − β1)·g,    v ← β2·v + (1 − β2)·g²
    w ← w·(1 − lr·decay) − lr·(μ_(t+1)·m / (1 − M_(t+1)) + (1 − μ_t)·g / (1 − M_t)) / (√(v / (1 − β2^t)) + ε)

with ψ = 0.004. The large β1 = 0.99 makes the look-ahead long, and (1 − μ_t)·g is the discounted gradient
(:mod:`petra.staleness.lookahead`). The paper's experiments use stashed weights and one update per microbatch: ``method=pipedream
k=1``. Its variant without stashed weights is ``method=petra`` or ``method.keep=input method.weights=current``; it also reduces the
learning rate by delay, as ``remedy=discount`` does.

Source: Dozat 2016, and Ajanthan et al. 2025 for the settings (compared with the code, PluralisResearch/AsyncPP). The arithmetic is
torch's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

MOMENTUM_DECAY = 0.004
"""ψ."""


def make_nadam(groups: Iterable[dict[str, Any]], betas: tuple[float, float], eps: float) -> torch.optim.NAdam:
    """Return NAdam with decoupled weight decay for parameter groups that have a ``weight_decay`` each."""
    return torch.optim.NAdam(
        groups, lr=0.0, betas=betas, eps=eps, momentum_decay=MOMENTUM_DECAY, decoupled_weight_decay=True, foreach=True
    )
