"""ResNet weights with torchvision's names, compared with a list of these names. torchvision isn't needed."""

from __future__ import annotations

import pytest
import torch

from petra import ModelError
from petra.models import MODELS
from petra.models.torchvision_names import from_torchvision, to_torchvision

REPEATS = {
    "resnet18": (1, (2, 2, 2, 2)),
    "resnet34": (1, (3, 4, 6, 3)),
    "resnet50": (4, (3, 4, 6, 3)),
    "resnet101": (4, (3, 4, 23, 3)),
}
Shapes = dict[str, tuple[int, ...]]


def conv_bn(conv: str, bn: str, out: int, into: int, kernel: int) -> Shapes:
    shapes: Shapes = {f"{conv}.weight": (out, into, kernel, kernel), f"{bn}.num_batches_tracked": ()}
    return shapes | {f"{bn}.{leaf}": (out,) for leaf in ("weight", "bias", "running_mean", "running_var")}


def torchvision_state(name: str) -> Shapes:
    """Return names and shapes in torchvision's ResNets. A BasicBlock has conv1 and conv2, a Bottleneck conv1 to conv3."""
    expansion, repeats = REPEATS[name]
    shapes, into = conv_bn("conv1", "bn1", 64, 3, 7), 64
    for layer, repeat in enumerate(repeats):
        planes = 64 * 2**layer
        for i in range(repeat):
            prefix, out = f"layer{layer + 1}.{i}.", expansion * planes
            sizes = [(planes, into, 3), (planes, planes, 3)]
            if expansion == 4:
                sizes = [(planes, into, 1), (planes, planes, 3), (out, planes, 1)]
            for n, size in enumerate(sizes, 1):
                shapes |= conv_bn(f"{prefix}conv{n}", f"{prefix}bn{n}", *size)
            if i == 0 and (layer or into != out):
                shapes |= conv_bn(f"{prefix}downsample.0", f"{prefix}downsample.1", out, into, 1)
            into = out
    return shapes | {"fc.weight": (1000, into), "fc.bias": (1000,)}


@pytest.mark.parametrize("name", REPEATS)
def test_names_and_shapes_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        state = MODELS[name](1000, stem="imagenet").build(0).state_dict()
    renamed = to_torchvision(state)
    assert {key: tuple(value.shape) for key, value in renamed.items()} == torchvision_state(name)
    assert all(renamed_value is value for renamed_value, value in zip(renamed.values(), state.values(), strict=True))


def test_conversion_there_and_back_keeps_weights() -> None:
    model = MODELS["resnet50"](7, width=1 / 16)
    chain, other = model.build(1), model.build(2)
    theirs = to_torchvision(chain.state_dict())
    other.load_state_dict(from_torchvision(model, theirs), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(chain.state_dict().values(), other.state_dict().values(), strict=True))
    old = {key: value for key, value in theirs.items() if not key.endswith("num_batches_tracked")}
    other.load_state_dict(from_torchvision(model, old), strict=True)


def test_invalid_states() -> None:
    model = MODELS["resnet18"](7, width=1 / 16)
    state = to_torchvision(model.build(0).state_dict())
    with pytest.raises(ModelError, match=r"layer4\.1\.conv2\.weight: missing, but resnet18 has this key"):
        from_torchvision(model, {key: value for key, value in state.items() if key != "layer4.1.conv2.weight"})
    with pytest.raises(ModelError, match=r"layer1\.0\.conv3\.weight: unknown key, resnet18 doesn't have it"):
        from_torchvision(model, state | {"layer1.0.conv3.weight": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"fc\.weight: expected shape \[7, 32\] for resnet18, got \[1000, 32\]"):
        from_torchvision(model, state | {"fc.weight": torch.zeros(1000, 32)})
    with pytest.raises(ModelError, match=r"stem\.layers\.0\.weight: torchvision's ResNets have no name for this key"):
        to_torchvision(MODELS["revnet18"](width=1 / 16).build(0).state_dict())
