"""Losses for semantic segmentation."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional as F

from petra.errors import require
from petra.specs import IGNORED

LARGEST_DENOMINATOR = 10**9
"""Fractions of pixels are rounded to the nearest ones with such a denominator: more than pixels of an image."""


def bootstrapped_cross_entropy(output: Tensor, targets: Tensor, *, fraction: float, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of the pixels with the highest losses: online bootstrapping.

    Of each image, ``fraction`` of the pixels that are not ignored count, rounded up. This is loss max-pooling with p = 1 and
    m = ``fraction`` (Rota Bulò et al. 2017). An image has the weight of its pixels that are not ignored, so the loss of a batch is
    the mean of the losses of its parts, weighted in the same way.

    Args:
        output: Scores, (B, C, H, W).
        targets: Classes, int64 (B, H, W), or -100 for pixels to ignore.
        fraction: Fraction of the pixels that count.
        label_smoothing: As for :func:`torch.nn.functional.cross_entropy`.

    Raises:
        ConfigError: If ``fraction`` is not > 0 and <= 1.
    """
    require(0 < fraction <= 1, "fraction", "a number > 0 and <= 1", fraction)
    losses = F.cross_entropy(output, targets, reduction="none", ignore_index=IGNORED, label_smoothing=label_smoothing).flatten(1)
    counted = (targets != IGNORED).flatten(1)
    pixels = counted.sum(1, keepdim=True)
    # In integers, since a product of floating-point numbers may be just above or below an integer. 0.07 is 7/100 here.
    exact = max(Fraction(fraction).limit_denominator(LARGEST_DENOMINATOR), Fraction(1, LARGEST_DENOMINATOR))
    hardest = (pixels * exact.numerator + exact.denominator - 1) // exact.denominator
    # The number of selected pixels differs between images, and reading it would wait for a GPU. A loss is never negative.
    ordered = torch.where(counted, losses, -1.0).sort(1, descending=True).values
    selected = torch.arange(ordered.shape[1], device=ordered.device) < hardest
    means = torch.where(selected, ordered, 0.0).sum(1, keepdim=True) / hardest.clamp(min=1)
    return (means * pixels).sum() / pixels.sum()


bootstrapped_cross_entropy.mean_over_targets = True  # type: ignore[attr-defined]
