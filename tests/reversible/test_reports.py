"""Public reports of users of other libraries for reversible layers and InPlace-ABN, tried with petra."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.report import kept_bytes
from petra.inplace_abn import InPlaceABN, to_inplace_abn
from petra.reversible import ReversibleSequence, TwoFunctionCoupling

# memcnn#44, RevTorch#10 and reformer-pytorch#19 (DistributedDataParallel) are test_sequence.py::test_data_parallel_wrappers.


def convolutions(channels: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


def couplings(depth: int = 4) -> ReversibleSequence:
    torch.manual_seed(0)
    return ReversibleSequence(TwoFunctionCoupling(convolutions(), convolutions()) for _ in range(depth))


def plainly(sequence: ReversibleSequence, *x: Tensor) -> tuple[Tensor, ...]:
    for block in sequence.blocks:
        x = block(*x)
    return x


def test_memcnn_29_the_loss_stays_finite_and_equals_plain_autograd() -> None:
    """Training became NaN when inputs were not kept."""
    reversible = nn.ModuleDict({"stem": nn.Conv2d(3, 8, 3, padding=1), "layers": couplings(2), "head": nn.Linear(8, 3)})
    losses: list[list[float]] = []
    for run in (lambda layers, *x: layers(*x), plainly):
        model: Any = copy.deepcopy(reversible)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses.append([])
        for seed in range(6):
            x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(seed % 3))
            y = torch.cat(run(model["layers"], *model["stem"](x).chunk(2, 1)), 1)
            loss = F.cross_entropy(model["head"](y.mean((2, 3))), torch.arange(8) % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("depth", [2, 8])
def test_memcnn_37_memory_does_not_depend_on_depth_or_step(depth: int) -> None:
    sequence, x = couplings(depth), torch.randn(2, 3, 4, 8, 8)
    for _ in range(3):
        kept = kept_bytes(lambda: sequence(x[0], x[1]), sequence.parameters())
        assert kept == 2 * x[0].nbytes
        sum(y.sum() for y in sequence(x[0], x[1])).backward()


def test_memcnn_36_two_backward_passes() -> None:
    """Two losses of one forward pass, backpropagated one after the other."""
    sequence, x = couplings().double(), torch.randn(2, 3, 4, 6, 6, dtype=torch.float64).requires_grad_()
    plain = copy.deepcopy(sequence)
    for model, run in ((sequence, lambda s, *x: s(*x)), (plain, plainly)):
        y1, y2 = run(model, x[0], x[1])
        y1.square().sum().backward(retain_graph=True)
        (y1 * y2).sum().backward()
    for p, q in zip(sequence.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(dict(sequence.named_buffers()), dict(plain.named_buffers()))


def test_revlib_7_autocast() -> None:
    """The backward pass met inputs in half precision and weights in float32."""
    sequence, x = couplings(2), torch.randn(2, 3, 4, 6, 6)
    plain, found = copy.deepcopy(sequence), []
    for model, run in ((sequence, lambda s, *x: s(*x)), (plain, plainly)):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(model, x[0], x[1])
        torch.stack(y).square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert found[-1].dtype == torch.float32
    assert (found[0] - found[1]).norm() < 0.02 * found[1].norm()


def test_memcnn_70_a_relu_before_the_layers() -> None:
    """The input was freed although the ReLU before needed it."""
    relu, sequence = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), couplings(2)
    sum(y.sum() for y in sequence(*relu(torch.randn(2, 3, 6, 6)).chunk(2, 1))).backward()
    assert relu[0].weight.grad.abs().sum() > 0


# mapillary/inplace_abn


def pair(channels: int = 5, eps: float = 1e-5) -> tuple[InPlaceABN, nn.Module]:
    torch.manual_seed(0)
    return InPlaceABN(channels, eps=eps).double(), nn.Sequential(nn.BatchNorm2d(channels, eps=eps), nn.LeakyReLU(0.01)).double()


def test_inplace_abn_155_a_sum_behind_the_layer() -> None:
    """Its gradient is one number for all entries, which their kernel read as if it were a whole tensor."""
    x, found = torch.randn(2, 5, 40, 6, dtype=torch.float64), []
    for layer in pair(eps=1e-9):
        leaf = x.clone().requires_grad_()
        layer(leaf * 2).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def test_inplace_abn_92_negative_weights_of_a_trained_network() -> None:
    """Their layer took |γ|."""
    layer, plain = pair()
    nn.init.constant_(plain[0].weight, -1.0)
    layer.load_state_dict(plain[0].state_dict())
    x = torch.rand(10, 5, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x))


def test_inplace_abn_163_a_trained_network_is_converted() -> None:
    """A ResNet lost all of its accuracy."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.LeakyReLU(0.01), nn.Conv2d(6, 2, 3)).double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    network[1].weight.data = torch.randn(6, dtype=torch.float64)
    network(x)
    expected = network.eval()(x)
    to_inplace_abn(network, report=lambda text: None)
    assert isinstance(network[1], InPlaceABN)
    torch.testing.assert_close(network(x), expected)


def test_inplace_abn_149_an_activation_in_place_behind_the_layer() -> None:
    """Autograd still notices a second write, and the conversion leaves none."""
    layer, _ = pair(4)
    h = layer(nn.Conv2d(3, 4, 1).double()(torch.randn(2, 3, 5, 5, dtype=torch.float64)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        F.relu_(h).sum().backward()
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    to_inplace_abn(network, report=lambda text: None)
    network(torch.randn(2, 3, 5, 5)).sum().backward()


def test_inplace_abn_166_an_input_without_gradient() -> None:
    """Autograd refused a changed input that was no output."""
    layer, plain = pair(3)
    x = torch.zeros(4, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x))
    layer(x).sum().backward()
    assert layer.bias.grad is not None


@pytest.mark.parametrize("form", ["sum", "concatenation"])
def test_inplace_abn_6_residual_and_dense_connections(form: str) -> None:
    """f(x) + x and cat([f(x), x]) with a layer that starts f: an error, or right numbers with ``overwrite=False``."""
    layer, plain = pair(4)
    conv, x = nn.Conv2d(3, 4, 1).double(), torch.randn(2, 3, 5, 5, dtype=torch.float64)

    def joined(norm: nn.Module) -> Tensor:
        h = conv(x)
        return norm(h) + h if form == "sum" else torch.cat([norm(h), h], 1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        joined(layer).sum().backward()
    layer.overwrite = False
    found, expected = (torch.autograd.grad(joined(norm).square().sum(), list(conv.parameters())) for norm in (layer, plain))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
