"""Language models: every option against plain formulas in float64, and training with every method against autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from petra import METHODS, ConfigError, Model, TensorSpec
from petra.models import gpt, revgpt, revvit
from petra.models.attention import MLP, Attention, HeadNorm, KeyValueCache, LayerOptions
from petra.reversible import derive_seed
from petra.settings import Numerics
from tests.models.test_transformer import Texts, double
from tests.support.nets import RandomSource, make_pipeline

CLASSES, LENGTH, BATCH, DIM = 11, 12, 3, 24
MODERN = {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rotary", "qk_norm": True, "kv_heads": 2}


class Documents(Texts):
    """Random tokens, in which token 0 begins a document."""

    spec = TensorSpec((BATCH, LENGTH), torch.int64)

    def _tokens(self, m: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(5, m))
        return torch.randint(CLASSES, (BATCH, LENGTH + 1), generator=generator) % 5


# --- formulas that share no code with the models ---


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """Rotation as a multiplication of complex numbers, one position and channel pair at a time."""
    length, channels = x.shape[-2:]
    y = x.clone()
    for t in range(length):
        for i in range(channels // 2):
            angle = torch.tensor(t / 10_000 ** (2 * i / channels), dtype=torch.float32)
            z = torch.complex(x[..., t, i], x[..., t, i + channels // 2])
            z = z * torch.complex(angle.cos().double(), angle.sin().double())
            y[..., t, i], y[..., t, i + channels // 2] = z.real, z.imag
    return y


def attend(layer: Attention, x: Tensor, documents: Tensor | None = None) -> Tensor:
    """Attention with loops over heads and an explicit mask."""
    options = layer.options
    size, queries, keys = options.head_dim, options.heads, options.kv_heads or options.heads
    norm = rms if options.norm == "rmsnorm" else layer_norm
    projected = norm(x, layer.norm.weight) @ layer.qkv.weight.T
    if layer.qkv.bias is not None:
        projected = projected + layer.qkv.bias
    heads = [projected[..., i * size : (i + 1) * size] for i in range(queries + 2 * keys)]
    allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    outputs = []
    for h in range(queries):
        q, k, v = heads[h], heads[queries + h * keys // queries], heads[queries + keys + h * keys // queries]
        if options.qk_norm:
            q, k = rms(q, layer.q_norm.weight), rms(k, layer.k_norm.weight)
        if options.rotary:
            q, k = rotated(q), rotated(k)
        scores = (q @ k.transpose(1, 2) / size**0.5).masked_fill(~allowed, float("-inf"))
        outputs.append(scores.softmax(-1) @ v)
    y = torch.cat(outputs, -1) @ layer.out.weight.T
    return y if layer.out.bias is None else y + layer.out.bias


@pytest.mark.filterwarnings("error")
def test_norm_of_bf16_heads_is_fused_and_accurate() -> None:
    """Torch warns if weights of another type keep it from its fused kernel."""
    torch.manual_seed(0)
    norm, x = HeadNorm(16), 0.01 * torch.randn(2, 3, 5, 16)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    y = norm(x.bfloat16())
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.double(), rms(x.bfloat16().double(), norm.weight.double()), rtol=0.02, atol=0.01)
    assert torch.equal(norm(x), F.rms_norm(x, (16,), norm.weight))


OPTIONS = {
    "gpt2": {},
    "rmsnorm": {"norm": "rmsnorm"},
    "no biases": {"bias": False},
    "rotary": {"rotary": True},
    "grouped queries": {"kv_heads": 2},
    "one key head": {"kv_heads": 1},
    "qk norm": {"qk_norm": True},
    "all": {"norm": "rmsnorm", "bias": False, "rotary": True, "kv_heads": 2, "qk_norm": True},
}


def random_layer(layer: torch.nn.Module) -> torch.nn.Module:
    """Return the layer in float64 with random weights, among them norms and biases."""
    torch.manual_seed(1)
    for p in layer.double().parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.3)
    return layer


@pytest.mark.parametrize(("name", "packed"), [(name, i % 2 == 0) for i, name in enumerate(OPTIONS)] + [("all", False)])
def test_attention_and_its_gradients_equal_the_formula(name: str, packed: bool) -> None:
    layer = random_layer(Attention(LayerOptions(DIM, heads=4, **OPTIONS[name])))
    if isinstance(layer.norm, torch.nn.LayerNorm) and layer.norm.bias is not None:
        torch.nn.init.zeros_(layer.norm.bias)
    x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64, requires_grad=True)
    starts = (torch.rand(BATCH, LENGTH) < 0.3).double() if packed else None
    found = layer(x) if starts is None else layer(x, starts)
    expected = attend(layer, x, None if starts is None else starts.cumsum(1))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # angles are float32
    weights = [x, *(p for p in layer.parameters() if p is not getattr(layer.norm, "bias", None))]
    probe = torch.randn_like(found)
    for a, b in zip(torch.autograd.grad(found, weights, probe), torch.autograd.grad(expected, weights, probe), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_mlps_equal_their_formulas() -> None:
    x = torch.randn(2, 4, 9, dtype=torch.float64)
    mlp = random_layer(MLP(LayerOptions(9, heads=1, mlp="swiglu", norm="rmsnorm", bias=False, hidden=5)))
    gate, up = mlp.up.weight[:5], mlp.up.weight[5:]
    h = rms(x, mlp.norm.weight)
    z = h @ gate.T
    torch.testing.assert_close(mlp(x), (z / (1 + (-z).exp()) * (h @ up.T)) @ mlp.down.weight.T)
    assert MLP(LayerOptions(96, heads=1, mlp="swiglu")).down.in_features == 256
    assert MLP(LayerOptions(100, heads=1, mlp="swiglu")).down.in_features == 320


@pytest.mark.parametrize("options", [{}, MODERN], ids=["gpt2", "modern"])
def test_a_cache_gives_the_same_as_the_whole_text(options: dict[str, object]) -> None:
    shape = {key: value for key, value in options.items() if key != "positions"}
    layer = random_layer(Attention(LayerOptions(DIM, heads=4, rotary="positions" in options, **shape)))
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    whole = layer(x)
    layer.cache = KeyValueCache()
    pieces = [layer(x[:, :3]), layer(x[:, 3:5]), layer(x[:, 5:6]), layer(x[:, 6:])]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-6, atol=1e-6)
    assert layer.cache.length == 7


# --- layers of each coupling ---


def test_midpoint_and_leapfrog_are_the_recurrences_of_their_paper() -> None:
    """x_(j+1) = x_(j-1) + 2h f(x_j), and x_(j+1) = 2 x_j - x_(j-1) + h^2 f(x_j)."""
    shape = {"classes": CLASSES, "dim": 8, "depth": 3, "heads": 2, "size": LENGTH}
    tokens, h = Documents().inputs(0), 0.4
    plain = double(gpt(**shape)).build(2)
    f = [block.f for name, block in plain.named_children() if name.startswith("layer")]
    for coupling, after in (
        ("midpoint", lambda a, b, j: a + 2 * h * f[j](b)),
        ("leapfrog", lambda a, b, j: 2 * b - a + h**2 * f[j](b)),
    ):
        chain = double(revgpt(**shape, coupling=coupling, step=h)).build(2)
        chain.load_state_dict(plain.state_dict())  # the same parameters under the same names
        x = chain.stem.tokens(tokens) + chain.stem.positions
        before, now = x, x
        for j in range(3):
            before, now = now, after(before, now, j)
        torch.testing.assert_close(chain(tokens), chain.head.linear(chain.head.norm(now)).flatten(0, 1))


def test_documents_in_one_row_do_not_see_each_other() -> None:
    chain = double(revgpt(CLASSES, dim=DIM, depth=2, heads=4, size=LENGTH, delimiter=0, **MODERN)).build(0)
    a, b = torch.tensor([0, 3, 4, 2, 1]), torch.tensor([0, 7, 3, 3, 9, 1, 2])
    together = chain(torch.cat([a, b])[None])
    torch.testing.assert_close(together[:5], chain(a[None]))
    torch.testing.assert_close(together[5:], chain(b[None]), rtol=1e-6, atol=1e-7)  # rotations at other positions


@pytest.mark.parametrize("build", [gpt, revgpt])
def test_embedding_std_scales_the_embedding_only(build: Callable[..., Model]) -> None:
    shape = {"dim": 64, "depth": 1, "heads": 2, "size": 32}
    wide, usual = build(**shape, embedding_std=0.2).build(0), build(**shape).build(0)
    for name, weight in wide.named_parameters():
        scale = 10.0 if name in ("stem.tokens.weight", "stem.positions") else 1.0
        torch.testing.assert_close(weight, scale * usual.get_parameter(name))
    assert float(wide.stem.tokens.weight.detach().std()) == pytest.approx(0.2, rel=0.02)


# --- training ---

NETS = {
    "gpt2": revgpt(CLASSES, dim=8, depth=3, heads=2, size=LENGTH),
    "revvit": revvit(CLASSES, patch=4, dim=8, depth=3, heads=2, size=8),
    "gpt": gpt(CLASSES, dim=8, depth=3, heads=2, size=LENGTH, delimiter=0),
    "modern": revgpt(CLASSES, dim=16, depth=3, heads=4, size=LENGTH, delimiter=0, **MODERN),
    "midpoint": revgpt(CLASSES, dim=16, depth=3, heads=4, size=LENGTH, coupling="midpoint", step=0.5, **MODERN),
    "leapfrog": revgpt(CLASSES, dim=16, depth=3, heads=4, size=LENGTH, delimiter=0, coupling="leapfrog", **MODERN),
}


METHOD_OF = {
    "gpt2": ("petra", "pipedream_2bw"),
    "revvit": ("petra", "dsp"),
    "gpt": ("petra", "pipedream"),
    "modern": ("petra", "reversible"),
    "midpoint": ("petra", "delayed"),
    "leapfrog": METHODS,
}


@pytest.mark.parametrize(("name", "method"), [(name, method) for name, methods in METHOD_OF.items() for method in methods])
def test_frozen_weights_give_the_plain_gradient(name: str, method: str) -> None:
    model, never, k = double(NETS[name]), 100, 3
    data = RandomSource(BATCH, 8, CLASSES) if name == "revvit" else Documents()
    pipeline = make_pipeline(
        model, data.spec, method=method, k=never, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.0), seed=3
    )
    pipeline.train(data, k)
    plain = model.build(3)
    for m in range(k):
        F.cross_entropy(plain(data.inputs(m)), data.targets(m)).backward()
    expected = dict(plain.named_parameters())
    for j, stage in pipeline.stages.items():
        for b, block in zip(pipeline.plan.layout.stages[j], stage.module, strict=True):
            for key, p in block.named_parameters():
                torch.testing.assert_close(p.grad * never, expected[f"{model.blocks[b].name}.{key}"].grad, rtol=1e-9, atol=1e-12)


def test_exact_streams_and_low_precision_messages_carry_the_documents() -> None:
    """The reconstruction is exact bit for bit, and the starts of documents survive a message in bf16."""
    data = Documents()
    exact = make_pipeline(NETS["leapfrog"], data.spec, k=2, optimizer=adamw, numerics=Numerics(exact_streams=True), seed=1)
    exact.train(data, 6)
    wired = make_pipeline(
        NETS["leapfrog"], data.spec, k=2, optimizer=adamw, numerics=Numerics(autocast=torch.bfloat16, wire=torch.bfloat16), seed=1
    )
    assert wired.train(data, 6).loss == pytest.approx(exact.train(data, 6).loss, rel=0.1)


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_heads": 4}, r"model\.kv_heads: expected null or a divisor of 6 \(model\.heads\), got 4"),
        ({"positions": "none"}, r"model\.positions: expected learned or rotary, got none"),
        (
            {"dim": 18, "positions": "rotary"},
            r"model\.dim: expected an even number of channels per head with model\.positions=rotary",
        ),
        ({"delimiter": 256}, r"model\.delimiter: expected null or a token from 0 to 255, got 256"),
        ({"embedding_std": float("inf")}, r"model\.embedding_std: expected a number > 0, got inf"),
        ({"coupling": "midpoint", "step": float("inf")}, r"model\.step: expected a number > 0; 1 for two_functions, got inf"),
        ({"step": 0.5}, r"model\.step: expected a number > 0; 1 for two_functions, got 0\.5"),
    ],
)
def test_invalid_options(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        revgpt(**arguments)
