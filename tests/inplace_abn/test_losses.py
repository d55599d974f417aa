"""Online bootstrapping against a loop in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from petra import ConfigError
from petra.inplace_abn.losses import bootstrapped_cross_entropy
from petra.specs import IGNORED


def loop(output: Tensor, targets: Tensor, fraction: float) -> float:
    """Return the loss, computed pixel by pixel."""
    total = pixels = 0.0
    for scores, classes in zip(output.numpy(), targets.numpy(), strict=True):
        losses = []
        for y in range(classes.shape[0]):
            for x in range(classes.shape[1]):
                if classes[y, x] != IGNORED:
                    losses.append(np.log(np.exp(scores[:, y, x]).sum()) - scores[classes[y, x], y, x])
        kept = sorted(losses)[::-1][: math.ceil(fraction * len(losses))]
        if kept:
            total += len(losses) * sum(kept) / len(kept)
            pixels += len(losses)
    return total / pixels


def example(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    output = 3 * torch.randn(3, 4, 5, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (3, 5, 7), generator=generator)
    ignored = torch.rand(targets.shape, generator=generator) < torch.tensor([0.1, 0.8, 1.0]).view(3, 1, 1)
    return output, targets.masked_fill(ignored, IGNORED)


def test_loss_equals_a_loop() -> None:
    """The images have different numbers of counted pixels. The third has none. All pixels give the cross-entropy."""
    output, targets = example(0)
    for fraction in (0.01, 0.25, 0.5, 1.0):
        found = bootstrapped_cross_entropy(output, targets, fraction=fraction)
        assert float(found) == pytest.approx(loop(output, targets, fraction), rel=1e-12)
    found = bootstrapped_cross_entropy(output, targets, fraction=1.0, label_smoothing=0.1)
    assert torch.allclose(found, F.cross_entropy(output, targets, label_smoothing=0.1), rtol=1e-12)


def test_only_the_hardest_pixels_have_a_gradient() -> None:
    output, targets = example(2)
    output.requires_grad_()
    bootstrapped_cross_entropy(output, targets, fraction=0.25).backward()
    trained = output.grad.abs().sum(1) > 0
    losses = F.cross_entropy(output.detach(), targets, reduction="none")
    for image in range(3):
        counted = targets[image] != IGNORED
        assert int(trained[image].sum()) == math.ceil(0.25 * int(counted.sum()))
        assert not trained[image][~counted].any()
        if counted.any():
            assert losses[image][trained[image]].min() >= losses[image][counted & ~trained[image]].max()
    assert torch.autograd.gradcheck(lambda scores: bootstrapped_cross_entropy(scores, targets, fraction=0.25), output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pixels_are_counted_exactly(dtype: torch.dtype) -> None:
    """Of n pixels, p hundredths are ceil(p n / 100), and one of a billion is one."""
    sizes = torch.arange(1, 131)
    targets = torch.zeros(len(sizes), 1, 130, dtype=torch.int64).masked_fill(torch.arange(130) >= sizes[:, None, None], IGNORED)
    for percent in (7, 15, 27, 30, 36, 54, 60, 72):
        output = torch.zeros(len(sizes), 2, 1, 130, dtype=dtype, requires_grad=True)
        bootstrapped_cross_entropy(output, targets, fraction=percent / 100).backward()
        counted = (output.grad != 0).any(1).sum((1, 2))
        assert counted.tolist() == [-(-percent * size // 100) for size in sizes.tolist()]
    output = torch.zeros(len(sizes), 2, 1, 130, dtype=dtype, requires_grad=True)
    bootstrapped_cross_entropy(output, targets, fraction=1e-12).backward()
    assert ((output.grad != 0).any(1).sum((1, 2)) == 1).all()


def test_parts_of_a_batch_weighted_by_their_pixels_give_the_loss_of_the_batch() -> None:
    """So the loss of replicas, weighted by their counted targets, is that of the joint batch."""
    output, targets = example(3)
    parts = [bootstrapped_cross_entropy(output[i : i + 1], targets[i : i + 1], fraction=0.25) for i in (0, 1)]
    weights = [(targets[i] != IGNORED).sum() for i in (0, 1)]
    joint = bootstrapped_cross_entropy(output, targets, fraction=0.25)
    assert torch.allclose(joint, (parts[0] * weights[0] + parts[1] * weights[1]) / sum(weights), rtol=1e-12)
    for fraction in (0.0, 1.1):
        with pytest.raises(ConfigError, match="fraction: expected a number > 0 and <= 1"):
            bootstrapped_cross_entropy(output, targets, fraction=fraction)
