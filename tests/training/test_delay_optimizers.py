"""NAdam and basis rotation against their formulas in float64, and their state in checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from petra.training import OPTIMIZERS

RATE, DECAY, EPS = 0.02, 0.1, 1e-6


class Words(nn.Module):
    """An embedding, two matrices of which one is wide, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.square, self.wide, self.norm = nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 3), nn.LayerNorm(6)
        self.double()


def gradients(module: nn.Module, steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in module.parameters()] for _ in range(steps)]


def step(optimizer: torch.optim.Optimizer, module: nn.Module, found: list[Tensor]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = RATE
    for p, g in zip(module.parameters(), found, strict=True):
        p.grad = g.clone()
    optimizer.step()


def decays(p: Tensor) -> float:
    return 1 - RATE * DECAY if p.dim() > 1 else 1.0


def test_nadam_is_the_formula_of_ajanthan_et_al() -> None:
    module, reference = Words(), [p.detach().clone() for p in Words().parameters()]
    optimizer = OPTIMIZERS["nadam"](module, eps=EPS, weight_decay=DECAY)
    beta1, beta2, product = 0.99, 0.999, 1.0
    m, v = ([torch.zeros_like(w) for w in reference] for _ in range(2))
    for t, found in enumerate(gradients(module, 6), 1):
        step(optimizer, module, found)
        now, following = (beta1 * (1 - 0.5 * 0.96 ** (0.004 * i)) for i in (t, t + 1))
        product *= now
        for i, g in enumerate(found):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            ahead = following * m[i] / (1 - product * following) + (1 - now) * g / (1 - product)
            reference[i] = reference[i] * decays(reference[i]) - RATE * ahead / ((v[i] / (1 - beta2**t)).sqrt() + EPS)
    for p, w in zip(module.parameters(), reference, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-7, atol=1e-9)  # torch stores M_t in float32


def eigenvectors(covariance: Tensor) -> Tensor:
    return torch.linalg.eigh(covariance)[1].flip(1)


def test_basis_rotation_is_adam_in_the_rotated_basis() -> None:
    module, reference = Words(), [p.detach().clone() for p in Words().parameters()]
    optimizer = OPTIMIZERS["basis_rotation"](module, betas=[0.8, 0.9], eps=EPS, weight_decay=DECAY, frequency=3)
    rotated = {i for i, (name, p) in enumerate(module.named_parameters()) if p.dim() == 2 and not name.startswith("table")}
    m, v = ([torch.zeros_like(w) for w in reference] for _ in range(2))
    covariances: dict[int, list[Tensor]] = {i: [torch.zeros(n, n).double() for n in reference[i].shape] for i in rotated}
    bases: dict[int, list[Tensor]] = {}
    for t, found in enumerate(gradients(module, 8), 1):
        step(optimizer, module, found)
        for i, g in enumerate(found):
            u, w = None, None
            if i in rotated:
                products = (g @ g.T, g.T @ g)
                covariances[i] = [0.9 * c + (1 - 0.9) * new for c, new in zip(covariances[i], products, strict=True)]
                if t == 1:
                    bases[i] = [eigenvectors(c) for c in covariances[i]]
                elif t % 3 == 0:
                    for side in (0, 1):
                        basis, covariance = bases[i][side], covariances[i][side]
                        order = torch.diag(basis.T @ covariance @ basis).argsort(descending=True)
                        v[i] = v[i][order] if side == 0 else v[i][:, order]
                        bases[i][side] = torch.linalg.qr(covariance @ basis[:, order])[0]
                u, w = bases[i]
            m[i] = 0.8 * m[i] + 0.2 * g
            inner, momentum = (g, m[i]) if u is None or w is None else (u.T @ g @ w, u.T @ m[i] @ w)
            v[i] = 0.9 * v[i] + 0.1 * inner**2
            change = momentum / (1 - 0.8**t) / ((v[i] / (1 - 0.9**t)).sqrt() + EPS)
            change = change if u is None or w is None else u @ change @ w.T
            reference[i] = reference[i] * decays(reference[i]) - RATE * change
    for p, expected in zip(module.parameters(), reference, strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=1e-8, atol=1e-10)


def test_sides_longer_than_the_largest_are_not_rotated() -> None:
    """With no rotated side, the optimizer is AdamW."""
    module, plain = Words(), Words()
    optimizer = OPTIMIZERS["basis_rotation"](module, betas=[0.8, 0.9], eps=EPS, weight_decay=DECAY)
    for group in optimizer.param_groups:
        group["largest"] = 2
    adamw = OPTIMIZERS["adamw"](plain, betas=[0.8, 0.9], eps=EPS, weight_decay=DECAY)
    for found in gradients(module, 4):
        step(optimizer, module, found)
        step(adamw, plain, found)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
