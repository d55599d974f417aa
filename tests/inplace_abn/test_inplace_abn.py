"""InPlace-ABN, and networks with it, against BatchNorm and activation with ordinary autograd."""

import copy
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.report import kept_bytes
from petra.cost_model.memory import stored_activations
from petra.diagnostics.activation_memory import measured
from petra.errors import ModelError
from petra.inplace_abn import CheckpointedABNConv, InPlaceABN, layer
from petra.model import Chain
from petra.models import MODELS, revnet18
from petra.reversible import Coupling
from petra.specs import as_streams
from petra.training import sgd
from tests.support.nets import RandomSource, make_pipeline
from tests.support.refusals import refuses

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": lambda y: F.leaky_relu(y, 0.01),
    "elu": F.elu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda y: y,
}
VARIANTS = ("I", "II")


def pair(channels: int, activation: str, variant: str = "II", **options) -> tuple[InPlaceABN, nn.Module]:
    """Return the layer and a batch normalisation with the same parameters. Some γ are negative, and β is far from zero."""
    layer = InPlaceABN(channels, activation, variant=variant, **options).double()
    batch_norm = nn.BatchNorm1d(channels, affine=options.get("affine", True), momentum=options.get("momentum", 0.1)).double()
    batch_norm._check_input_dim = lambda x: None
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.randn(channels).sign() * (0.3 + torch.rand(channels)))
            layer.bias.copy_(2 * torch.randn(channels))
    batch_norm.load_state_dict(layer.state_dict())
    return layer, batch_norm


def gradients(function: Callable[[Tensor], Tensor], x: Tensor, module: nn.Module, delta: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of input and parameters."""
    x = x.detach().requires_grad_()
    z = function(x)
    found = torch.autograd.grad(z, [x, *module.parameters()], delta)
    return [z.detach(), *found]


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-9) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


SHAPES = ((2, 1), (7, 5), (3, 4, 9), (5, 3, 7, 1), (1, 6, 5, 3), (2, 3, 3, 4, 5))
COMBINED = [(SHAPES[(i + j) % 6], a, v, (i + j) % 2 == 0) for i, a in enumerate(ACTIVATIONS) for j, v in enumerate(VARIANTS)]


@pytest.mark.parametrize(
    ("shape", "activation", "variant", "affine"), [*COMBINED, (SHAPES[0], "elu", "I", True), (SHAPES[5], "tanh", "II", False)]
)
def test_equals_batch_norm_and_activation(shape: tuple[int, ...], activation: str, variant: str, affine: bool) -> None:
    torch.manual_seed(0)
    layer, batch_norm = pair(shape[1], activation, variant, affine=affine)
    reference = ACTIVATIONS[activation]
    for training in (True, True, False):
        layer.train(training), batch_norm.train(training)
        x, delta = 3 * torch.randn(shape, dtype=torch.float64) + 1, torch.randn(shape, dtype=torch.float64)
        found = gradients(lambda x: layer(x.clone()), x, layer, delta)
        assert_same(found, gradients(lambda x: reference(batch_norm(x)), x, batch_norm, delta))


def test_halves_the_bytes_kept_and_writes_to_the_memory_of_the_input() -> None:
    """BatchNorm stores x, and the activation or the convolution after it stores z. This layer stores z only."""
    conv, standard, layer = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), InPlaceABN(8)
    parameters = [*conv.parameters(), *standard.parameters(), *layer.parameters()]
    x = torch.randn(4, 8, 32, 32)
    own, one, few = kept_bytes(lambda: conv(x), parameters), x.nbytes, 4 * 8 * 4  # four numbers per channel
    assert own == one
    with_batch_norm = kept_bytes(lambda: conv(F.leaky_relu(standard(conv(x)), inplace=True)), parameters) - own
    with_abn = kept_bytes(lambda: conv(layer(conv(x))), parameters) - own
    assert 2 * one <= with_batch_norm <= 2 * one + few
    assert one <= with_abn <= one + few
    assert layer(x).data_ptr() == x.data_ptr()
    with torch.no_grad():
        assert layer.eval()(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("activation", "keep", "training", "affine"),
    [(a, ("input", "normalised")[i % 2], i % 3 < 2, i % 4 > 0) for i, a in enumerate(ACTIVATIONS)],
)
def test_checkpointing_equals_plain_autograd(activation: str, keep: str, training: bool, affine: bool) -> None:
    torch.manual_seed(2)
    norm, batch_norm = pair(4, activation, affine=affine)
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=affine).double()
    block, plain = CheckpointedABNConv(norm, conv, keep), nn.ModuleList([batch_norm, copy.deepcopy(conv)])
    block.train(training), plain.train(training)
    x, delta = torch.randn(3, 4, 7, 5, dtype=torch.float64), torch.randn(3, 6, 4, 3, dtype=torch.float64)

    def reference(x: Tensor) -> Tensor:
        return plain[1](ACTIVATIONS[activation](batch_norm(x)))

    assert_same(gradients(lambda x: block(x.clone()), x, block, delta), gradients(reference, x, plain, delta))
    for a, b in zip(block.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_gamma_near_zero_is_replaced_and_gets_a_gradient_and_a_fixed_gamma_none() -> None:
    layer, batch_norm = pair(3, "leaky_relu")
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.0, 1e-7, -1e-7]))
        batch_norm.weight.copy_(torch.tensor([1e-5, 1e-5, -1e-5]))
    x, delta = torch.randn(2, 6, 3, 5, dtype=torch.float64)
    found = gradients(lambda x: layer(x.clone()), x, layer, delta)
    assert_same(found, gradients(lambda x: F.leaky_relu(batch_norm(x), 0.01), x, batch_norm, delta))
    assert (found[2] != 0).all()
    fixed = InPlaceABN(3, fixed_scale=True).double()
    batch_norm.load_state_dict(fixed.state_dict())  # γ is 1
    fixed(x.clone()).backward(delta)
    F.leaky_relu(batch_norm(x), 0.01).backward(delta)
    assert fixed.weight.grad is None
    assert_same([fixed.bias.grad], [batch_norm.bias.grad])


@pytest.mark.parametrize(("activation", "limit"), [("sigmoid", 1), ("tanh", 1), ("elu", -1)])
def test_saturated_activations_give_finite_gradients(activation: str, limit: int) -> None:
    layer, x = InPlaceABN(1, activation), torch.full((4000, 1), 0.1)
    x[0], x[1] = 100.0 * limit, 0.1 if activation == "elu" else -100.0  # x̂ about -45 for elu: z is -1 in float32
    with torch.no_grad():
        layer.weight.fill_(1.0 if activation == "elu" else 10.0)
    z = layer(x.requires_grad_().clone())
    assert z[0] == limit
    z.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_changed_before_the_backward_pass(variant: str) -> None:
    """As in a pipeline that stores graphs. Gradients equal those of batch norm, again if the graph is retained."""
    torch.manual_seed(3)
    layer, batch_norm = pair(3, "leaky_relu", variant)
    x, delta = torch.randn(2, 6, 3, 5, dtype=torch.float64)
    results = []
    for module, function in ((layer, lambda x: layer(x.clone())), (batch_norm, lambda x: F.leaky_relu(batch_norm(x), 0.01))):
        x = x.detach().requires_grad_()
        z = function(x)
        with torch.autograd._unsafe_preserve_version_counter(tuple(module.parameters())), torch.no_grad():
            for p in module.parameters():
                p.mul_(-1.5)
        before = z.detach().clone()
        for _ in range(2):
            results.append(list(torch.autograd.grad(z, [x, *module.parameters()], delta, retain_graph=True)))
        assert torch.equal(z, before)
    for found in results[:3]:
        assert_same(found, results[3])


@pytest.mark.parametrize("module", ["abn", "normalised"])
def test_autocast_in_bf16(module: str) -> None:
    """Activations in bf16, statistics and parameters in float32."""
    torch.manual_seed(4)
    layer = InPlaceABN(8)
    first, second = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1)
    block = nn.Sequential(layer, second) if module == "abn" else CheckpointedABNConv(layer, second, module)
    batch_norm = nn.BatchNorm2d(8)
    x = torch.randn(16, 3, 8, 8)
    results = []
    for function in (block, lambda x: second(F.leaky_relu(batch_norm(x), 0.01))):
        norm = layer if function is block else batch_norm
        with torch.autocast("cpu", torch.bfloat16):
            y = function(first(x))
        assert y.dtype == torch.bfloat16
        parameters = [*first.parameters(), *norm.parameters(), *second.parameters()]
        results.append([y.detach().float(), *torch.autograd.grad(y.float().square().mean(), parameters)])
    for a, b in zip(*results, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02 * b.abs().max().item())
    torch.testing.assert_close(layer.running_mean, batch_norm.running_mean, rtol=0.01, atol=1e-3)


test_bad_arguments = refuses(
    lambda build: build(),
    (lambda: InPlaceABN(3, "relu"), "activation: expected leaky_relu, .* or identity, which are invertible, got relu"),
    (
        lambda: CheckpointedABNConv(InPlaceABN(3), nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), "input"),
        r"conv: expected zero padding .*\(1, 1\) of mode circular",
    ),
    (partial(MODELS["resnext101"], norm="groupnorm"), "model.norm: expected batchnorm, inplace_abn or inplace_abn_sync, got group"),
    (partial(MODELS["resnext101"], activation="elu"), "expected relu or leaky_relu with model.norm=batchnorm, got elu"),
)


def test_plain_operations_replace_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    fake = SimpleNamespace(trial=fails, supports=lambda z: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    layer._compiled_kernels.cache_clear()
    z: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    with pytest.warns(UserWarning, match="Triton can't compile its kernels .RuntimeError: Failed to find C compiler"):
        assert layer._kernels(z) is None
    assert layer._kernels(z) is None  # one warning
    fake.trial = lambda device: None
    layer._compiled_kernels.cache_clear()
    assert layer._kernels(z) is fake
    layer._compiled_kernels.cache_clear()


SMALL = {"resnext101": {"cardinality": 2, "base_width": 16}}
FAMILIES = ("resnet18", "revnet50", "resnext101", "wide_resnet38")


def small(name: str, norm: str) -> Chain:
    width = 1 / 64 if name == "wide_resnet38" else 1 / 16
    return MODELS[name](classes=3, width=width, norm=norm, activation="leaky_relu", **SMALL.get(name, {})).build(seed=1).double()


@pytest.mark.parametrize("name", FAMILIES)
def test_inplace_abn_equals_batch_norm_and_leaky_relu(name: str) -> None:
    """And blocks leave the callers' tensors unchanged."""
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with_abn, plain = small(name, "inplace_abn"), small(name, "batchnorm")
    assert with_abn.state_dict().keys() == plain.state_dict().keys()
    assert not any(isinstance(m, nn.BatchNorm2d | nn.LeakyReLU) for m in with_abn.modules())
    for chain in (with_abn, plain):
        chain(x).square().sum().backward()
    for p, q in zip(with_abn.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9 * max(1, q.grad.abs().max().item()))
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
