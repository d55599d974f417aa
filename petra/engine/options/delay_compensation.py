"""Delay compensation of DC-ASGD: a gradient at old weights is corrected to first order for the current weights.

    g ← g + λ·g⊙g⊙(w − w_old)

for the gradient g of each microbatch, where w_old are the weights that its backward pass differentiated, w the weights at the
end of that pass, ⊙ the product by elements, and λ the setting. λ·g⊙g approximates the diagonal of the Hessian.

Source: Zheng et al. 2017, Asynchronous Stochastic Gradient Descent with Delay Compensation (arXiv 1609.08326), with a constant
λ. The abstract was read; the formula agrees with it, and λ = 0.04 is from memory.
"""

from __future__ import annotations

from petra.engine.block import BlockRunner, WrappedRunner
from petra.reversible import Gradients
from petra.specs import Streams


class Compensated(WrappedRunner):
    """Runner whose gradients at old weights are corrected.

    Args:
        inner: BlockRunner of a block, whose method stashes weights.
        strength: λ.
    """

    def __init__(self, inner: BlockRunner, strength: float) -> None:
        super().__init__(inner)
        self._strength = strength

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        old = self.versions.stashed.get(m)
        x, dx, gradients = self.inner.backward(m, y, dy)
        if old is not None:
            names = {p: name for name, p in self.parameters.items()}
            gradients = {p: g + self._strength * g * g * (p.detach() - old[names[p]].detach()) for p, g in gradients.items()}
        return x, dx, gradients
