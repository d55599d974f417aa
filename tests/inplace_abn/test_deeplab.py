"""DeepLabV3: shapes, parameters, dilation, and exact gradients in a pipeline."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import ModelError, TensorSpec
from petra.inplace_abn import deeplabv3
from petra.inplace_abn.losses import bootstrapped_cross_entropy
from petra.models import MODELS
from petra.specs import IGNORED
from tests.support.nets import assert_plain_gradients, double

IMAGE = TensorSpec((2, 3, 64, 96), torch.float32)
CLASSES = 7


@pytest.mark.parametrize(
    ("body", "features", "options"),
    [("resnet50", 2048, {}), ("revnet18", 1024, {}), ("resnext101", 2048, {"cardinality": 64}), ("wide_resnet38", 4096, {})],
)
def test_parameters_are_those_of_the_classification_network_and_the_head(body: str, features: int, options: dict[str, int]) -> None:
    stem = {} if body == "wide_resnet38" else {"stem": "imagenet"}
    classifier = MODELS[body](classes=1, **stem, **options).profile(TensorSpec((2, 3, 64, 64), torch.float32))
    *blocks, context, predict = deeplabv3(CLASSES, body).profile(IMAGE)
    assert [block.parameters for block in blocks] == [block.parameters for block in classifier[:-1]]
    normalised = 2 * features if body == "wide_resnet38" else 0  # the head normalises the body's output first
    branches = sum(features * 256 * kernel**2 for kernel in (1, 3, 3, 3, 1)) + 2 * 1280
    head = branches + 1280 * 256 + 2 * 256 + 257 * CLASSES  # reduction and prediction
    assert context.parameters + predict.parameters == normalised + head
    assert blocks[-1].outputs[0].shape[2:] == (8, 12)
    assert predict.outputs[0].shape == (2, CLASSES, 64, 96)


@pytest.mark.parametrize(
    ("body", "method", "stages", "norm"), [("resnet18", "1f1b", 4, "batchnorm"), ("revnet18", "reversible", 4, "inplace_abn")]
)
def test_gradients_equal_those_of_autograd(body: str, method: str, stages: int, norm: str) -> None:
    """Two microbatches, float64, ignored pixels; a pipeline of stages against one backward pass of the whole network."""
    torch.manual_seed(0)
    images = torch.randn(2, 2, 3, 32, 32, dtype=torch.float64)
    targets = torch.randint(CLASSES, (2, 2, 32, 32)).masked_fill(torch.rand(2, 2, 32, 32) < 0.2, IGNORED)
    spec = TensorSpec((2, 3, 32, 32), torch.float64)
    data = SimpleNamespace(inputs=images.__getitem__, targets=targets.__getitem__, spec=spec)
    assert_plain_gradients(double(deeplabv3(CLASSES, body, 0.125, norm=norm)), data, 2, method=method, stages=stages)


class PlainHead(nn.Module):
    """The published head, written for this test: each branch has its own normalisation, and all of them are then stacked."""

    def __init__(self, features: int, channels: int, classes: int) -> None:
        super().__init__()
        kernels = [(1, 1), (3, 12), (3, 24), (3, 36), (1, 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(features, channels, kernel, padding=dilation * (kernel // 2), dilation=dilation, bias=False)
            for kernel, dilation in kernels
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in kernels)
        self.reduce = nn.Conv2d(5 * channels, channels, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.predict = nn.Conv2d(channels, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = [x] * 4 + [F.adaptive_avg_pool2d(x, 1)]
        parts = [F.relu(norm(conv(part))) for norm, conv, part in zip(self.norms, self.convolutions, inputs, strict=True)]
        parts[4] = F.interpolate(parts[4], x.shape[2:], mode="nearest")
        y = self.predict(F.relu(self.norm(self.reduce(torch.cat(parts, 1)))))
        return F.interpolate(y, scale_factor=8, mode="bilinear", align_corners=False)


def test_head_equals_a_plain_one_in_training_and_evaluation() -> None:
    """Outputs and gradients over three batches in float64, then the output in evaluation, which has the running statistics."""
    torch.manual_seed(3)
    network = double(deeplabv3(CLASSES, "resnet18", 0.125)).build(0)
    context, predict = network.context, network.predict
    features, channels = context.branches[0].in_channels, context.reduce[0].out_channels
    plain = PlainHead(features, channels, CLASSES).double()
    (pooled,) = (m for m in context.pooled.modules() if isinstance(m, nn.Conv2d))
    layers = [*context.branches, pooled, context.reduce[0], predict.scores]
    pairs = [*zip(layers, [*plain.convolutions, plain.reduce, plain.predict], strict=True)]
    for ours, theirs in pairs:
        theirs.load_state_dict(ours.state_dict())
    for _ in range(3):
        x = torch.randn(3, features, 4, 5, dtype=torch.float64)
        found, expected = (head(x) for head in (lambda x: predict(context(x)), plain))
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
        scores = torch.randn_like(found)
        for output in (found, expected):
            (output * scores).sum().backward()
    for ours, theirs in pairs:
        assert torch.allclose(ours.weight.grad, theirs.weight.grad, rtol=1e-8, atol=1e-10)
    with torch.no_grad():
        assert torch.allclose(predict.eval()(context.eval()(x)), plain.eval()(x), rtol=1e-9, atol=1e-12)


def test_replicas_with_shared_statistics_may_have_one_image_each() -> None:
    """Shapes are determined before the replicas' group exists."""
    image = TensorSpec((1, 3, 64, 96), torch.float32)
    profile = deeplabv3(CLASSES, "resnet18", 0.125, norm="inplace_abn_sync").profile(image)
    assert profile[-1].outputs[0].shape == (1, CLASSES, 64, 96)
    for norm in ("batchnorm", "inplace_abn"):
        with pytest.raises(ModelError, match=r"values? per channel"):
            deeplabv3(CLASSES, "resnet18", 0.125, norm=norm).profile(image)


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
    output.requires_grad_()
    counted = (targets != IGNORED).sum((1, 2))
    for fraction in (1e-12, 0.07, 0.25, 0.54, 1.0):
        found = bootstrapped_cross_entropy(output, targets, fraction=fraction)
        assert found.item() == pytest.approx(loop(output.detach(), targets, fraction), rel=1e-12)
        (gradient,) = torch.autograd.grad(found, output)
        trained = (gradient.abs().sum(1) > 0).sum((1, 2))  # only the hardest pixels have a gradient
        assert trained.tolist() == [math.ceil(fraction * n) for n in counted.tolist()]
    for pixels, fraction, expected in ((25, 0.6, 15), (45, 4 / 15, 12)):  # as products of floating-point numbers, one more
        scores = torch.randn(1, 3, 1, pixels, dtype=torch.float64, requires_grad=True)
        loss = bootstrapped_cross_entropy(scores, torch.zeros(1, 1, pixels, dtype=torch.int64), fraction=fraction)
        (gradient,) = torch.autograd.grad(loss, scores)
        assert int((gradient.abs().sum(1) > 0).sum()) == expected
    found = bootstrapped_cross_entropy(output, targets, fraction=1.0, label_smoothing=0.1)
    assert torch.allclose(found, F.cross_entropy(output, targets, label_smoothing=0.1), rtol=1e-12)
