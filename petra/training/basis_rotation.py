"""Basis rotation: Adam in an estimated eigenbasis of the Hessian, in which stale gradients do less harm.

For a matrix of weights w with gradient g, after t steps:

    L ← β2·L + (1 − β2)·g·gᵀ,    R ← β2·R + (1 − β2)·gᵀ·g
    every ``frequency`` steps: U ← Q of the QR decomposition of L·U, and V ← Q of that of R·V
    m ← β1·m + (1 − β1)·g,    v ← β2·v + (1 − β2)·(Uᵀ·g·V)²
    w ← w·(1 − lr·decay) − lr·U·(m̂' / (√v̂ + ε))·Vᵀ,    m̂' = Uᵀ·m·V / (1 − β1^t),    v̂ = v / (1 − β2^t)

At the first step, U and V are the eigenvectors of L and R. Before a QR decomposition, the columns of U are sorted by
diag(Uᵀ·L·U), and the rows of v like them; the same for V and the columns of v. This is SOAP (Vyas et al. 2024) with the
momentum in the parameters' basis. Delays mix directions of high and low curvature when Adam's basis is not aligned with the
Hessian's; in the eigenbasis, they do not.

Parameters that are no matrices, embeddings, and sides longer than ``largest`` are not rotated (U or V is then the identity).

Source: arXiv 2602.03515, compared with the code (joonkyoo/basis-rotation), whose setting "bi, 2nd" this is. There, ε is added to √v
before the correction by 1 − β2^t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

SIDES = ("left", "right")


class BasisRotation(torch.optim.Optimizer):
    """Adam with decoupled weight decay in a rotated basis.

    Args:
        groups: Parameter groups, each with ``weight_decay`` and ``rotated``: whether its parameters are matrices to rotate.
        betas: β1 and β2.
        eps: ε.
        frequency: Number of steps between two updates of the basis.
        largest: Largest number of rows or columns of a rotation.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, betas: tuple[float, float], eps: float, frequency: int, largest: int = 2048
    ) -> None:
        defaults = {"lr": 0.0, "betas": betas, "eps": eps, "frequency": frequency, "largest": largest, "rotated": False}
        super().__init__(groups, defaults | {"weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)

    def _step(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), lr = self.state[p], group["betas"], group["lr"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float64)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            sizes = {side: n for side, n in zip(SIDES, p.shape, strict=False) if group["rotated"] and n <= group["largest"]}
            for side, n in sizes.items():
                state[f"covariance_{side}"] = torch.zeros(n, n, dtype=p.dtype, device=p.device)
        state["step"] += 1
        t = int(state["step"])
        if "covariance_left" in state:
            state["covariance_left"].lerp_(g @ g.mT, 1 - beta2)
        if "covariance_right" in state:
            state["covariance_right"].lerp_(g.mT @ g, 1 - beta2)
        if t % group["frequency"] == 0 or t == 1:
            _rotate_basis(state)
        state["exp_avg"].lerp_(g, 1 - beta1)
        state["exp_avg_sq"].lerp_(_rotated(g, state).square(), 1 - beta2)
        scale = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt_().add_(group["eps"])
        update = _rotated(_rotated(state["exp_avg"], state) / scale, state, back=True)
        p.mul_(1 - lr * group["weight_decay"]).sub_(update, alpha=lr / (1 - beta1**t))


def _rotate_basis(state: dict[str, Any]) -> None:
    """Compute the bases, or improve them by one step of orthogonal iteration and sort the second moments like their columns."""
    for dim, side in enumerate(SIDES):
        if f"covariance_{side}" not in state:
            continue
        covariance, basis = state[f"covariance_{side}"], state.get(f"basis_{side}")
        if basis is None:
            state[f"basis_{side}"] = torch.linalg.eigh(covariance)[1].flip(1).contiguous()
            continue
        image = covariance @ basis
        order = (basis * image).sum(0).argsort(descending=True, stable=True)
        state["exp_avg_sq"] = state["exp_avg_sq"].index_select(dim, order)
        state[f"basis_{side}"] = torch.linalg.qr(image[:, order])[0].contiguous()


def _rotated(matrix: Tensor, state: dict[str, Any], *, back: bool = False) -> Tensor:
    """Return Uᵀ·matrix·V, or U·matrix·Vᵀ to rotate back."""
    left, right = (state.get(f"basis_{side}") for side in SIDES)
    if left is not None:
        matrix = (left if back else left.mT) @ matrix
    return matrix if right is None else matrix @ (right.mT if back else right)
