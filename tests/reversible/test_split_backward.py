"""Backward passes in two parts against one backward pass: the same gradients bit for bit, from the same products."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from petra.models import revgpt, revnet18
from petra.reversible import Coupling, TwoFunctionCoupling, differentiate, differentiate_inputs
from tests.support.nets import branch
from tests.support.operations import Operations


class Shared(nn.Module):
    """Reads one weight twice, another through a view, and a third not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.view, self.unused = nn.Linear(6, 6), nn.Parameter(torch.randn(4, 9)), nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(torch.tanh(self.twice(x))) @ (2 * self.view.reshape(6, 6)).exp()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "convolutions": (lambda: nn.Sequential(branch(4), branch(4)), (2, 4, 6, 6), 2),
    "biases": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), (3, 6), 2),
    "attention": (Attention, (2, 3, 8), 2),
    "shared": (Shared, (3, 6), 1),
    "none": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Tanh()), (3, 6), 0),
}
"""Networks, shapes of their inputs, and numbers of products that can be differentiated in two parts."""


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_two_parts_give_the_gradients_of_one(name: str, autocast: bool) -> None:
    build, shape, products = NETS[name]
    torch.manual_seed(1)
    net, x, dy = build(), torch.randn(shape), torch.randn(shape)
    weights = list(net.parameters())

    def outputs() -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            return leaf, net(leaf)

    leaf, y = outputs()
    (expected_dx,), whole = differentiate([y], [leaf], weights, [dy.to(y.dtype)])
    leaf, y = outputs()
    calls = 0

    def counted(*arguments: object, **options: object) -> tuple[Tensor | None, ...]:
        nonlocal calls
        calls += 1
        return grad(*arguments, **options)  # type: ignore[arg-type]

    grad = torch.autograd.grad
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", counted)
        (dx,), later = differentiate_inputs([y], [leaf], weights, [dy.to(y.dtype)])
        assert calls == 1
        found = later()
    assert calls == 1 + products
    assert dx is not None
    assert expected_dx is not None
    assert torch.equal(dx, expected_dx)
    for g, expected in zip(found, whole(), strict=True):
        assert (g is None) == (expected is None)
        assert g is None or torch.equal(g, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["convolutions", "attention", "shared"])
def test_no_product_is_computed_twice(name: str) -> None:
    build, shape, _ = NETS[name]
    net, x, dy = build(), torch.randn(shape), torch.randn(shape)
    flops = []
    for function in (differentiate, differentiate_inputs):
        leaf = x.clone().requires_grad_()
        y = net(leaf)
        with FlopCounterMode(display=False) as counter:
            _, later = function([y], [leaf], list(net.parameters()), [dy])
            first = counter.get_total_flops()
            later()
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1]
    assert 0.4 < first / flops[1] < 0.9


def test_the_first_block_of_a_model_has_no_second_part() -> None:
    """Data needs no gradient, so nothing can be sent before the gradients of the weights."""
    net = nn.Linear(3, 3)
    y = net(torch.randn(2, 3))
    dx, later = differentiate_inputs([y], [], list(net.parameters()), [torch.ones_like(y)])
    assert dx == []
    assert torch.equal(later()[1], torch.full((3,), 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("build", [lambda: Coupling(branch(4)), lambda: TwoFunctionCoupling(branch(4), branch(4))])
def test_a_reversible_block_gives_the_same_in_two_parts(build: Callable[[], Coupling]) -> None:
    torch.manual_seed(2)
    block, y, dy = build(), (torch.randn(2, 4, 5, 5),) * 2, (torch.randn(2, 4, 5, 5), torch.randn(2, 4, 5, 5))
    x, dx, expected = block.inverse_vjp(y, dy)
    found_x, found_dx, later = block.inverse_input_vjp(y, dy)
    found = later()
    assert all(torch.equal(a, b) for a, b in zip((*x, *dx), (*found_x, *found_dx), strict=True))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[p], expected[p]) for p in expected)


@pytest.mark.parametrize("model", [revnet18(width=1 / 16), revgpt(11, size=6, dim=8, heads=2, depth=2)])
def test_blocks_of_the_models_have_their_products_in_the_second_part(model: object) -> None:
    block = model.blocks[1].build()  # type: ignore[attr-defined]
    weights = list(block.parameters())
    shape = (2, 4, 8, 8) if "revnet" in model.name else (2, 6, 8)  # type: ignore[attr-defined]
    y = (torch.randn(shape), torch.randn(shape))
    with Operations() as first:
        *_, later = block.inverse_input_vjp(y, y)
    with Operations() as second:
        found = later()
    assert len(found) == len(weights)
    kind = "convolution_backward" if "convolution" in first.names else "mm"
    products = sum(p.dim() > 1 for p in weights)
    assert second.names[kind] == products
    assert first.names["convolution_backward"] == (products if "convolution" in first.names else 0)


@pytest.mark.parametrize("other", [lambda w: w.sum(0).expand(3, 6), lambda w: w, lambda w: w @ w])
def test_an_output_that_depends_on_a_weight_only_adds_to_its_gradient(other: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(3, 6, requires_grad=True), nn.Parameter(torch.randn(6, 6))
    found = []
    for function in (differentiate, differentiate_inputs):
        outputs = [x @ w, other(w)]
        dx, dw = function(outputs, [x], [w], [torch.ones_like(y) for y in outputs])
        found.append((*dx, *dw()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
