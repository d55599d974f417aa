"""InPlace-ABN, and networks with it, against BatchNorm and activation with ordinary autograd."""

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
from petra.errors import ModelError
from petra.inplace_abn import InPlaceABN, layer
from petra.model import Chain
from petra.models import MODELS, revnet18
from petra.reversible import Coupling, frozen_statistics, normalisations
from petra.specs import as_streams
from petra.training import sgd
from reproduction.stored_memory import measured
from tests.support.nets import RandomSource, make_pipeline
from tests.support.refusals import refuses


def pair(channels: int, slope: float = 0.01) -> tuple[InPlaceABN, nn.Module]:
    """Return the layer and a batch normalisation with the same parameters. Some γ are negative, and β is far from zero."""
    layer, batch_norm = InPlaceABN(channels, slope).double(), nn.BatchNorm1d(channels).double()
    batch_norm._check_input_dim = lambda x: None
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


@pytest.mark.parametrize("slope", [0.01, 1])
@pytest.mark.parametrize("shape", [(2, 1), (7, 5), (3, 4, 9), (5, 3, 7, 1), (1, 6, 5, 3), (2, 3, 3, 4, 5)])
def test_equals_batch_norm_and_activation(shape: tuple[int, ...], slope: float) -> None:
    torch.manual_seed(0)
    layer, batch_norm = pair(shape[1], slope)
    for training in (True, True, False):
        layer.train(training), batch_norm.train(training)
        x, delta = 3 * torch.randn(shape, dtype=torch.float64) + 1, torch.randn(shape, dtype=torch.float64)
        found = gradients(lambda x: layer(x.clone()), x, layer, delta)
        assert_same(found, gradients(lambda x: F.leaky_relu(batch_norm(x), slope), x, batch_norm, delta))


def test_frozen_statistics_stay_and_the_batch_normalises() -> None:
    layer, x = InPlaceABN(3), torch.randn(4, 3, 5, 5)
    before = [buffer.clone() for buffer in layer.buffers()]
    with frozen_statistics(normalisations(layer)):
        frozen = layer(x.clone())
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), before, strict=True))
    assert torch.equal(layer(x.clone()), frozen)


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
    h = conv(x)
    assert layer(h).data_ptr() == h.data_ptr()


def test_gamma_near_zero_is_replaced_and_gets_a_gradient() -> None:
    layer, batch_norm = pair(3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.0, 1e-7, -1e-7]))
        batch_norm.weight.copy_(torch.tensor([1e-5, 1e-5, -1e-5]))
    x, delta = torch.randn(2, 6, 3, 5, dtype=torch.float64)
    found = gradients(lambda x: layer(x.clone()), x, layer, delta)
    assert_same(found, gradients(lambda x: F.leaky_relu(batch_norm(x), 0.01), x, batch_norm, delta))
    assert (found[2] != 0).all()


def test_parameters_changed_before_the_backward_pass() -> None:
    """As in a pipeline that stores graphs. Gradients equal those of batch norm, again if the graph is retained."""
    torch.manual_seed(3)
    layer, batch_norm = pair(3)
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


def test_autocast_in_bf16() -> None:
    """Activations in bf16, statistics and parameters in float32."""
    torch.manual_seed(4)
    layer = InPlaceABN(8)
    first, second = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1)
    block = nn.Sequential(layer, second)
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
    (lambda: InPlaceABN(3, 0), "slope: expected a number > 0 and <= 1, got 0"),
    (partial(MODELS["resnext101"], norm="groupnorm"), "model.norm: expected batchnorm, inplace_abn or inplace_abn_sync, got group"),
    (
        partial(MODELS["resnext101"], cardinality=1, base_width=256),
        "model.base_width: expected another one than 256 with model.cardinality=1, got 256",
    ),
    (partial(MODELS["resnext_preact"], depth=50), "model.depth: expected 101 or 152, got 50"),
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
FAMILIES = ("resnet18", "revnet50", "resnext101", "resnext_preact", "wide_resnet38")


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
    block, conv = Coupling(InPlaceABN(4)), nn.Conv2d(4, 4, 1)
    with pytest.raises(ModelError, match="InPlaceABN modifies its input in place"):
        block(torch.randn(3, 4, 5, 5), conv(torch.randn(3, 4, 5, 5)))
    x1, x2 = torch.randn(3, 4, 5, 5), torch.randn(3, 4, 5, 5)
    y1, y2 = Coupling(InPlaceABN(4, overwrite=False))(x1, x2)
    torch.testing.assert_close(y2 - x1, InPlaceABN(4)(y1.clone()))


READERS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a sum, left": lambda abn, h: h + abn(h),
    "a sum, right": lambda abn, h: abn(h) + h,
    "a concatenation": lambda abn, h: torch.cat([h, abn(h)], 1),
    "a product": lambda abn, h: abn(h) * h,
    "a function": lambda abn, h: abn(h) + F.avg_pool2d(h, 3, 1, 1),
    "a write": lambda abn, h: abn(h) + h.add_(1),
    "a mean without gradients": lambda abn, h: abn(h) * h.detach().mean(),
    "a second branch of a segmentation network": lambda abn, h: F.interpolate(abn(h), (8, 8)) + F.interpolate(h, (8, 8)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_of_the_overwritten_input_raises(name: str) -> None:
    """And gives the gradients of batch norm if the layer does not overwrite its input."""
    torch.manual_seed(0)
    read, (norm, batch_norm) = READERS[name], pair(4)
    conv, x = nn.Conv2d(3, 4, 1).double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        read(norm, conv(x)).square().sum().backward()
    assert "\n" not in str(caught.value)
    if name == "a write":
        return
    norm.overwrite, results = False, []
    for act in (norm, nn.Sequential(batch_norm, nn.LeakyReLU(0.01))):
        y = read(act, conv(x))
        results.append([y, *torch.autograd.grad(y.square().sum(), [*conv.parameters(), *act.parameters()])])
    assert_same(*results)


def test_only_what_autograd_records_is_overwritten() -> None:
    """Neither a caller's data, nor one half of a tensor, nor anything in evaluation without gradients."""
    torch.manual_seed(0)
    (norm, batch_norm), x = pair(4), torch.randn(2, 4, 3, 3, dtype=torch.float64)
    act, before = nn.Sequential(batch_norm, nn.LeakyReLU(0.01)), x.clone()
    for leaf in (x, x.clone().requires_grad_()):
        torch.testing.assert_close(leaf + norm(leaf), leaf + act(leaf))
    with torch.no_grad():
        torch.testing.assert_close(x + norm.eval()(x), x + act.eval()(x))
    assert torch.equal(x, before)
    h = torch.cat([x, x], 1).requires_grad_() * 1
    torch.testing.assert_close(norm(h.chunk(2, 1)[0]) + h[:, :4], act(x) + x)


def test_attributes_of_an_overwritten_input_can_be_read() -> None:
    norm, h = InPlaceABN(4), nn.Conv2d(3, 4, 1)(torch.randn(2, 3, 8, 8))
    norm(h)
    assert (h.shape, h.dtype, h.size(1), h.dim(), h.requires_grad) == ((2, 4, 8, 8), torch.float32, 4, 4, True)
