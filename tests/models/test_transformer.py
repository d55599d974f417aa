"""Reversible transformers: layers against independent formulas, and training against ordinary autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import BlockSpec, ConfigError, Model, ModelError, TensorSpec
from petra.models import revgpt, revvit
from petra.models.attention import MLP, Attention, LayerOptions
from petra.reversible import derive_seed
from petra.settings import Numerics
from petra.specs import as_streams
from tests.support.nets import RandomSource, make_pipeline

CLASSES, LENGTH, BATCH = 11, 6, 3


class Texts:
    """Data source of random tokens. Each target is the next token."""

    spec = TensorSpec((BATCH, LENGTH), torch.int64)

    def _tokens(self, m: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(5, m))
        return torch.randint(CLASSES, (BATCH, LENGTH + 1), generator=generator)

    def inputs(self, m: int) -> Tensor:
        return self._tokens(m)[:, :-1]

    def targets(self, m: int) -> Tensor:
        return self._tokens(m)[:, 1:].flatten()


def gpt(dropout: float = 0.0) -> Model:
    return revgpt(CLASSES, dim=8, depth=3, heads=2, dropout=dropout, size=LENGTH)


def vit(dropout: float = 0.0) -> Model:
    return revvit(CLASSES, patch=4, dim=8, depth=3, heads=2, dropout=dropout, size=8)


def double(model: Model) -> Model:
    return Model(model.name, tuple(BlockSpec(b.name, lambda build=b.build: build().double()) for b in model.blocks))


# --- layers ---


def test_attention_to_all_positions_equals_torchs() -> None:
    layer = Attention(LayerOptions(12, heads=3, causal=False))
    nn.init.normal_(layer.out.weight, std=0.3)
    x = torch.randn(2, 5, 12)
    reference = nn.MultiheadAttention(12, 3, batch_first=True)
    reference.load_state_dict(
        {
            "in_proj_weight": layer.qkv.weight,
            "in_proj_bias": layer.qkv.bias,
            "out_proj.weight": layer.out.weight,
            "out_proj.bias": layer.out.bias,
        }
    )
    normalised = F.layer_norm(x, (12,))
    expected, _ = reference(normalised, normalised, normalised)
    torch.testing.assert_close(layer(x), expected)


def test_mlp_is_a_normalisation_and_two_layers() -> None:
    mlp = MLP(LayerOptions(6, heads=1)).double()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    (w1, b1), (w2, b2) = ((layer.weight, layer.bias) for layer in (mlp.up, mlp.down))
    assert w1.shape == (24, 6)
    hidden = (x - x.mean(2, keepdim=True)) / (x.var(2, unbiased=False, keepdim=True) + 1e-5).sqrt() @ w1.T + b1
    torch.testing.assert_close(mlp(x), hidden * (1 + torch.erf(hidden / 2**0.5)) / 2 @ w2.T + b2)


def test_stems_give_both_streams_content_and_position() -> None:
    stem, tokens = gpt().build_block(0, 0), Texts().inputs(0)
    x1, x2 = stem(tokens)
    assert torch.equal(x1, x2)
    assert torch.equal(x1[1, 2], stem.tokens.weight[tokens[1, 2]] + stem.positions[2])
    assert torch.equal(stem(tokens[:, :4])[0], x1[:, :4])

    stem, images = vit().build_block(0, 0), torch.randn(2, 3, 8, 8)
    x1, x2 = stem(images)
    assert torch.equal(x1, x2)
    assert x1.is_contiguous()
    patch = images[1, :, 4:, :4].flatten()  # the third of four, row by row
    torch.testing.assert_close(x1[1, 2], stem.patches.weight.flatten(1) @ patch + stem.positions[2])


# --- size and cost ---


def test_parameters_and_flops_of_revgpt() -> None:
    v, d, length, depth, batch = 50, 24, 16, 5, 2
    profile = revgpt(v, dim=d, depth=depth, heads=4, size=length).profile(TensorSpec((batch, length), torch.int64))
    stem, *layers, head = profile
    assert [b.reversible for b in profile] == [False, *[True] * depth, False]
    assert [b.outputs[0].shape for b in profile] == [*[(batch, length, d)] * (depth + 1), (batch * length, v)]
    assert stem.parameters == (v + length) * d
    assert {b.parameters for b in layers} == {12 * d * d + 13 * d}
    assert head.parameters == 4 * d + 2 * d * v + v
    tokens = batch * length
    assert stem.flops == 0
    # Masked positions of the attention matrix are counted too.
    assert {b.flops for b in layers} == {2 * tokens * 12 * d * d + 4 * tokens * length * d}
    assert head.flops == 2 * tokens * 2 * d * v


@pytest.mark.parametrize(("dim", "heads", "millions", "gigaflops"), [(384, 6, 22, 4.6), (768, 12, 87, 17.6)])
def test_revvit_has_the_papers_size(dim: int, heads: int, millions: int, gigaflops: float) -> None:
    """Rev-ViT-S and Rev-ViT-B (Mangalam et al. 2022, Table 1, in multiply-adds)."""
    model = revvit(1000, patch=16, dim=dim, depth=12, heads=heads, size=224)
    profile = model.profile(TensorSpec((1, 3, 224, 224), torch.float32))
    assert round(sum(b.parameters for b in profile) / 1e6) == millions
    assert sum(b.flops for b in profile) / 2e9 == pytest.approx(gigaflops, rel=0.015)


@pytest.mark.parametrize("model", [revgpt(dim=96, depth=8, heads=4, size=64), revvit(dim=96, depth=8, heads=4)])
def test_initial_weights_are_gpt2s(model: Model) -> None:
    for name, p in model.build(1).named_parameters():
        if name.endswith("norm.weight"):
            assert (p == 1).all(), name
        elif name.endswith("bias"):
            assert (p == 0).all(), name
        else:
            ends_branch = name.endswith(("f.out.weight", "g.down.weight"))
            assert p.std().item() == pytest.approx(0.02 / 4 if ends_branch else 0.02, rel=0.05), name


@pytest.mark.parametrize("build", [revgpt, revvit])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 0}, "model.classes: expected an integer >= 1, got 0"),
        ({"dim": 50, "heads": 4}, r"model.dim: expected a multiple of 4 \(model.heads\), got 50"),
        ({"dropout": 1.0}, "model.dropout: expected a number >= 0 and < 1, got 1.0"),
    ],
)
def test_invalid_arguments(build: type, arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**arguments)


def test_invalid_inputs() -> None:
    with pytest.raises(ConfigError, match=r"model\.patch: expected a divisor of 32, the side of the images in pixels, got 5"):
        revvit(patch=5)
    with pytest.raises(ConfigError, match=r"model\.size: expected an integer >= 1, got 0"):
        revgpt(size=0)
    with pytest.raises(ModelError, match=r"block stem: expected an input .* from the data \(expected at most 6 tokens, got 7\)"):
        gpt().profile(TensorSpec((2, LENGTH + 1), torch.int64))
    with pytest.raises(ModelError, match=r"block stem: expected an input that it accepts, got .* from the data"):
        vit().profile(TensorSpec((2, 3, 16, 16), torch.float32))


# --- training ---


@pytest.mark.parametrize("build", [revgpt, revvit])
def test_bf16_autocast_keeps_streams_in_float32(build: type) -> None:
    model = build(CLASSES, dim=8, depth=2, heads=2, dropout=0.1, size=8)
    data = RandomSource(BATCH, 8, CLASSES, torch.float32) if build is revvit else Texts()
    pipeline = make_pipeline(
        model,
        data.spec,
        k=4,
        optimizer=lambda m: torch.optim.SGD(m.parameters()),
        numerics=Numerics(autocast=torch.bfloat16),
        stages=2,
        seed=1,
    )
    streams = as_streams(pipeline.stages[0].forward(0, (data.inputs(0),)))
    assert [t.dtype for t in streams] == [torch.float32] * 2
    x, dx = pipeline.stages[0].backward(0, streams, streams)
    assert (x, dx) == ((), ())  # the first stage sends nothing back
    pipeline.train(data, 3)
    parameters = [p for stage in pipeline.stages.values() for p in stage.module.parameters()]
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in parameters)
