"""Transformers: every option against plain formulas in float64, training with every method against autograd, generation of text."""

from collections.abc import Callable
from itertools import islice, product

import pytest
import torch
from torch import Tensor

from examples.vision_transformer import revvit
from petra import METHODS, ConfigError, Model, ModelError, TensorSpec
from petra.models import gpt, revgpt
from petra.models.attention import MLP, Attention, LayerOptions
from petra.models.generation import Sampling, generate
from petra.models.language import POSITIONS
from tests.support.nets import RandomSource, RandomTokens, assert_plain_gradients, double
from tests.support.refusals import refuses

CLASSES, LENGTH, BATCH, DIM = 11, 12, 3, 24
TEXTS = RandomTokens(BATCH, LENGTH, 5)
"""Token 0 begins a document."""
MODERN = {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rotary", "qk_norm": True, "kv_heads": 2}


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
    allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    allowed = allowed.tril() if options.causal else allowed
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


OPTIONS = {
    "gpt2": {},
    "rmsnorm": {"norm": "rmsnorm"},
    "no biases": {"bias": False},
    "all positions": {"causal": False},
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
    mlp = random_layer(MLP(LayerOptions(9, heads=1)))
    h = (layer_norm(x, mlp.norm.weight) + mlp.norm.bias) @ mlp.up.weight.T + mlp.up.bias
    torch.testing.assert_close(mlp(x), h * (1 + torch.erf(h / 2**0.5)) / 2 @ mlp.down.weight.T + mlp.down.bias)
    assert MLP(LayerOptions(96, heads=1, mlp="swiglu")).down.in_features == 256
    assert MLP(LayerOptions(100, heads=1, mlp="swiglu")).down.in_features == 320


def test_documents_in_one_row_do_not_see_each_other() -> None:
    chain = double(revgpt(CLASSES, dim=DIM, depth=2, heads=4, size=LENGTH, delimiter=0, **MODERN)).build(0)
    a, b = torch.tensor([0, 3, 4, 2, 1]), torch.tensor([0, 7, 3, 3, 9, 1, 2])
    together = chain(torch.cat([a, b])[None])
    torch.testing.assert_close(together[:5], chain(a[None]))
    torch.testing.assert_close(together[5:], chain(b[None]), rtol=1e-6, atol=1e-7)  # rotations at other positions


def test_parameters_and_flops_of_revgpt() -> None:
    v, d, length, depth, batch = 50, 24, 16, 5, 2
    profile = revgpt(v, dim=d, depth=depth, heads=4, size=length).profile(TensorSpec((batch, length), torch.int64))
    tokens = batch * length
    assert [b.reversible for b in profile] == [False, *[True] * depth, False]
    assert [b.outputs[0].shape for b in profile] == [*[(batch, length, d)] * (depth + 1), (tokens, v)]
    assert [b.parameters for b in profile] == [(v + length) * d, *[12 * d * d + 13 * d] * depth, 4 * d + 2 * d * v + v]
    # Masked positions of the attention matrix are counted too.
    layer = 2 * tokens * 12 * d * d + 4 * tokens * length * d
    assert [b.flops for b in profile] == [0, *[layer] * depth, 2 * tokens * 2 * d * v]


@pytest.mark.parametrize("delimiter", [None, 0])
def test_heads_equal_their_formulas(delimiter: int | None) -> None:
    x1, x2, documents = *torch.randn(2, BATCH, LENGTH, DIM, dtype=torch.float64), torch.zeros(BATCH, LENGTH, dtype=torch.float64)
    context = () if delimiter is None else (documents,)
    for reads in ("concat", "sum", "last", "norms"):
        model = double(revgpt(CLASSES, dim=DIM, depth=1, heads=2, size=LENGTH, delimiter=delimiter, head=reads))
        head = random_layer(model.build(0).head)
        weights, bias = dict(head.named_parameters()), head.linear.bias
        norms = [(weights[f"norms.{i}.weight"], weights[f"norms.{i}.bias"]) for i in (0, 1)] if reads == "norms" else []
        one = torch.cat([x1, x2], dim=2) if reads == "concat" else x2 if reads == "last" else x1 + x2
        read = [one] if reads != "norms" else [x1, x2]
        pairs = norms or [(head.norm.weight, head.norm.bias)]
        normal = sum(layer_norm(x, weight) + shift for x, (weight, shift) in zip(read, pairs, strict=True))
        torch.testing.assert_close(head(x1, x2, *context), (normal @ head.linear.weight.T + bias).flatten(0, 1), msg=reads)
        assert head.linear.in_features == DIM * (2 if reads == "concat" else 1)


@pytest.mark.parametrize(("dim", "heads", "millions", "gigaflops"), [(384, 6, 22, 4.6), (768, 12, 87, 17.6)])
def test_revvit_has_the_papers_size(dim: int, heads: int, millions: int, gigaflops: float) -> None:
    """Rev-ViT-S and Rev-ViT-B (Mangalam et al. 2022, Table 1, in multiply-adds)."""
    model = revvit(1000, patch=16, dim=dim, depth=12, heads=heads, size=224)
    profile = model.profile(TensorSpec((1, 3, 224, 224), torch.float32))
    assert round(sum(b.parameters for b in profile) / 1e6) == millions
    assert sum(b.flops for b in profile) / 2e9 == pytest.approx(gigaflops, rel=0.015)


@pytest.mark.parametrize(
    ("model", "std"),
    [
        (revgpt(dim=96, depth=8, heads=4, size=64), 0.02),
        (revgpt(dim=96, depth=8, embedding_std=0.2), 0.2),
        (gpt(dim=96, depth=8, embedding_std=0.2), 0.2),
        (revvit(dim=96, depth=8, heads=4), 0.02),
    ],
)
def test_initial_weights_are_gpt2s(model: Model, std: float) -> None:
    """The deviation of the embedding can be chosen."""
    for name, p in model.build(1).named_parameters():
        if name.endswith("norm.weight"):
            assert (p == 1).all(), name
        elif name.endswith("bias"):
            assert (p == 0).all(), name
        else:
            ends_branch = name.endswith((".out.weight", ".down.weight"))
            expected = std if name.startswith("stem") else 0.02 / 4 if ends_branch else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.05), name


NETS = {
    "gpt2": revgpt(CLASSES, dim=8, depth=3, heads=2, size=LENGTH),
    "revvit": revvit(CLASSES, patch=4, dim=8, depth=3, heads=2, size=8),
    "gpt": gpt(CLASSES, dim=8, depth=3, heads=2, size=LENGTH, delimiter=0),
    "modern": revgpt(CLASSES, dim=16, depth=3, heads=4, size=LENGTH, delimiter=0, **MODERN),
    **{head: revgpt(CLASSES, dim=8, depth=2, heads=2, size=LENGTH, delimiter=0, head=head) for head in ("sum", "last", "norms")},
}


def test_patches_give_both_streams_content_and_position() -> None:
    stem, images = NETS["revvit"].build_block(0, 0), torch.randn(2, 3, 8, 8)
    x1, x2 = stem(images)
    assert torch.equal(x1, x2)
    assert x1.is_contiguous()
    patch = images[1, :, 4:, :4].flatten()  # the third of four, row by row
    torch.testing.assert_close(x1[1, 2], stem.patches.weight.flatten(1) @ patch + stem.positions[2])


METHOD_OF = {"gpt2": ("petra", "pipedream_2bw"), "revvit": ("petra", "dsp"), "gpt": ("petra", "pipedream"), "modern": METHODS}
METHOD_OF |= dict.fromkeys(("sum", "last", "norms"), ("petra",))


@pytest.mark.parametrize(("name", "method"), [(name, method) for name, methods in METHOD_OF.items() for method in methods])
def test_frozen_weights_give_the_plain_gradient(name: str, method: str) -> None:
    data = RandomSource(BATCH, 8, CLASSES) if name == "revvit" else TEXTS
    assert_plain_gradients(double(NETS[name]), data, 5, method=method)


test_invalid_options = refuses(
    lambda build, arguments: build(**arguments),
    (revvit, {"patch": 5}, r"model\.patch: expected a divisor of 32, the side of the images in pixels, got 5"),
    (revgpt, {"kv_heads": 4}, r"model\.kv_heads: expected null or a divisor of 6 \(model\.heads\), got 4"),
    (revgpt, {"dim": 18, "positions": "rotary"}, r"model\.dim: expected an even number of channels per head with model\.pos"),
    (revgpt, {"head": "first"}, r"model\.head: expected concat, sum, last or norms, got first"),
    (revgpt, {"delimiter": 256}, r"model\.delimiter: expected null or a token from 0 to 255, got 256"),
)


SIZE = 12
SHAPE = {"classes": 9, "dim": 16, "depth": 2, "heads": 4, "size": SIZE}
SHAPES = {"modern": {key: value for key, value in MODERN.items() if key != "positions"}, "gpt2": {}}
FORMS = [(build, positions, form) for build in (gpt, revgpt) for positions in POSITIONS for form in SHAPES]
PROMPTS = [3, 0, 4, 1], [0, 3, 1, 0], [0, 0, 2], [2, 1, 0, 5, 0, 7, 3]


@pytest.mark.parametrize(("i", "build", "positions", "form"), [(i, *form) for i, form in enumerate(FORMS)])
def test_logits_of_a_text_are_those_of_training(i: int, build: Callable[..., Model], positions: str, form: str) -> None:
    """Token by token with a cache, or at once without. Positions attend to their own document, if there are several."""
    narrow = {"stream": 4, "wide_layers": i % 2} if i % 3 == 1 else {}
    shape = {**SHAPE, **SHAPES[form], "size": 16, "positions": positions, "delimiter": None if i % 3 == 0 else 0, **narrow}
    model = build(**shape).build(3).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    given, prompt = list[torch.Tensor](), PROMPTS[i % 4]
    with model.get_submodule("head").register_forward_hook(lambda head, x, logits: given.append(logits[-1])):
        found = list(islice(generate(model, prompt, Sampling(0), seed=0), 9))
    logits = model(torch.tensor([prompt + found[:-1]]))[len(prompt) - 1 :]
    torch.testing.assert_close(torch.stack(given), logits, rtol=1e-9, atol=1e-9)
    assert found == logits.argmax(1).tolist()
    assert all(layer.cache is None for layer in model.modules() if isinstance(layer, Attention))


def test_text_longer_than_the_context_starts_again_from_its_last_half() -> None:
    model = revgpt(**SHAPE, **MODERN, delimiter=0).build(1).eval()
    found = [5, *islice(generate(model, [5], Sampling(0), 0), 30)]
    again = list(islice(generate(model, found[SIZE - 5 : SIZE + 1], Sampling(0), 0), 5))
    assert found[SIZE + 1 : SIZE + 6] == again


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.1, 0.3, 0.1]),
        (Sampling(temperature=0), [1, 0, 0, 0]),
        (Sampling(temperature=0.5), [0.25 / 0.36, 0.01 / 0.36, 0.09 / 0.36, 0.01 / 0.36]),
        (Sampling(top_k=2), [0.625, 0, 0.375, 0]),
        (Sampling(top_k=1), [1, 0, 0, 0]),
        (Sampling(top_p=0.6), [0.625, 0, 0.375, 0]),
        (Sampling(top_p=0.4), [1, 0, 0, 0]),
        (Sampling(top_p=0.85), [0.5 / 0.9, 0.1 / 0.9, 0.3 / 0.9, 0]),
    ],
)
def test_frequencies_of_samples(sampling: Sampling, expected: list[float]) -> None:
    logits, generator = torch.tensor([0.5, 0.1, 0.3, 0.1]).log(), torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.tensor([sampling.draw(logits, generator) for _ in range(4000)]), minlength=4)
    torch.testing.assert_close(counts / 4000, torch.tensor(expected, dtype=torch.float32), atol=0.03, rtol=0)


def test_the_seed_decides_the_text_and_the_stop_token_ends_it() -> None:
    model = revgpt(**SHAPE).build(1).eval()
    texts = [list(islice(generate(model, [5], Sampling(), seed), 30)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    stop = texts[0][7]
    assert list(generate(model, [5], Sampling(), 1, stop)) == texts[0][: texts[0].index(stop)]
    for network, prompt, message in (
        (model, [], "prompt: expected at least one token"),
        (model, [-1], f"prompt: expected tokens less than {SHAPE['classes']}, got "),
        (revvit().build(0), [1], "run: expected a run of a language model, got a network without tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            next(generate(network, prompt, Sampling(), 0))


def test_logits_of_a_diverged_network_are_refused() -> None:
    for value, temperature in product((float("nan"), float("inf")), (0.0, 1.0)):
        with pytest.raises(ModelError, match=f"weights: expected those of a network with finite logits, got {value}"):
            Sampling(temperature).draw(torch.tensor([0.0, value, 1.0]), torch.Generator())
