"""Networks with InPlace-ABN against networks with batch normalisation and leaky ReLU; sizes of ResNeXt and WideResNet-38."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.report import kept_bytes
from petra.cost_model.memory import stored_activations
from petra.diagnostics.activation_memory import measured
from petra.errors import ConfigError, ModelError
from petra.inplace_abn import InPlaceABN
from petra.model import Chain
from petra.models import MODELS, revnet18
from petra.reversible import Coupling
from petra.specs import as_streams
from petra.training import sgd
from tests.support.nets import RandomSource, make_pipeline

SMALL = {"resnext101": {"cardinality": 2, "base_width": 16}}
FAMILIES = ("resnet18", "revnet50", "resnext101", "wide_resnet38")


def small(name: str, norm: str) -> Chain:
    width = 1 / 64 if name == "wide_resnet38" else 1 / 16
    return MODELS[name](classes=3, width=width, norm=norm, activation="leaky_relu", **SMALL.get(name, {})).build(seed=1).double()


@pytest.mark.parametrize(
    ("name", "options", "blocks", "parameters"),
    # Counts of torchvision (64x4d, 32x8d), timm (32x4d), and the InPlace-ABN authors' code (WideResNet-38).
    [
        ("resnext101", {"stem": "imagenet", "cardinality": 64}, 35, 83_455_272),
        ("resnext101", {"stem": "imagenet", "base_width": 8}, 35, 88_791_336),
        ("resnext152", {"stem": "imagenet"}, 52, 59_951_400),
        ("wide_resnet38", {}, 19, 109_167_912),
    ],
)
def test_size(name: str, options: dict[str, object], blocks: int, parameters: int) -> None:
    with torch.device("meta"):
        chain = MODELS[name](1000, norm="inplace_abn", **options).build(0)
    assert len(list(chain.children())) == blocks
    assert sum(p.numel() for p in chain.parameters()) == parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_inplace_abn_equals_batch_norm_and_leaky_relu(name: str) -> None:
    """It stores less, and blocks leave the callers' tensors unchanged."""
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with_abn, plain = small(name, "inplace_abn"), small(name, "batchnorm")
    assert with_abn.state_dict().keys() == plain.state_dict().keys()
    assert not any(isinstance(m, nn.BatchNorm2d | nn.LeakyReLU) for m in with_abn.modules())
    for chain in (with_abn, plain):
        chain(x).square().sum().backward()
    for p, q in zip(with_abn.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9 * max(1, q.grad.abs().max().item()))
    for a, b in zip(with_abn.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    stored, more = (kept_bytes(lambda c=c: c(x), c.parameters()) for c in (with_abn, plain))
    assert stored < 0.9 * more
    torch.testing.assert_close(with_abn.eval()(x), plain.eval()(x), rtol=1e-9, atol=1e-9)
    made, streams = [(x, x.clone())], (x,)
    for block in with_abn.train().children():
        streams = as_streams(block(*streams))
        made += [(y, y.clone()) for y in streams]
    assert all(torch.equal(y, copy) for y, copy in made)


def test_a_stage_stores_less_and_as_much_as_predicted() -> None:
    stored = {}
    for norm in ("inplace_abn", "batchnorm"):
        model, data = revnet18(width=1 / 16, norm=norm), RandomSource(size=32, dtype=torch.float32)
        pipeline = make_pipeline(model, data.spec, method="backprop", stages=[3, 7], optimizer=sgd, learning_rate=lambda t: 0.01)
        stored[norm] = measured(pipeline, data, 2)
        # What a function keeps without save_for_backward is predicted, but not measured.
        assert stored_activations(pipeline.plan) == pytest.approx(stored[norm], rel=0.03)
    assert all(less < 0.75 * more for less, more in zip(stored["inplace_abn"], stored["batchnorm"], strict=True))


def test_a_block_may_not_normalise_its_input_in_place() -> None:
    block = Coupling(InPlaceABN(4))
    with pytest.raises(ModelError, match="InPlaceABN modifies its input in place"):
        block(torch.randn(3, 4, 5, 5), torch.randn(3, 4, 5, 5))
    x1, x2 = torch.randn(3, 4, 5, 5), torch.randn(3, 4, 5, 5)
    y1, y2 = Coupling(InPlaceABN(4, overwrite=False))(x1, x2)
    torch.testing.assert_close(y2 - x1, InPlaceABN(4)(y1.clone()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": "groupnorm"}, "model.norm: expected batchnorm, inplace_abn or inplace_abn_sync, got groupnorm"),
        ({"norm": "inplace_abn", "activation": "relu"}, "expected leaky_relu with model.norm=inplace_abn, got relu"),
        ({"activation": "elu"}, "model.activation: expected relu or leaky_relu with model.norm=batchnorm, got elu"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MODELS["resnext101"](**arguments)
