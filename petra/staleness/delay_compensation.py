"""Delay compensation of DC-ASGD: a gradient at old weights is corrected to first order for the current weights.

    g ← g + λ·g⊙g⊙(w − w_old)

for the gradient g of each microbatch, where w_old are the weights that its backward pass differentiated, w the weights at the
end of that pass, ⊙ the product by elements, and λ the setting. λ·g⊙g approximates the diagonal of the Hessian.

Source: Zheng et al. 2017, Asynchronous Stochastic Gradient Descent with Delay Compensation (arXiv 1609.08326), with a constant
λ. The abstract was read; the formula agrees with it, and λ = 0.04 is from memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def compensated(
    gradients: Mapping[nn.Parameter, Tensor], old: Mapping[nn.Parameter, Tensor], strength: float
) -> dict[nn.Parameter, Tensor]:
    """Return corrected gradients.

    Args:
        gradients: Gradient g of each parameter.
        old: Weights w_old at which the gradients were computed, of each parameter.
        strength: λ.
    """
    return {p: g + strength * g * g * (p.detach() - old[p].detach()) for p, g in gradients.items()}
