"""Existing networks converted to InPlace-ABN and back, against the same networks with leaky ReLU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.report import kept_bytes
from petra.errors import ModelError
from petra.inplace_abn import InPlaceABN, authors_state, to_batch_norm, to_inplace_abn
from petra.inplace_abn.convert import Conversion
from petra.models import resnet50, revnet38
from tests.support.processes import run_processes


class Bottleneck(nn.Module):
    """A block as in torchvision: one ReLU module, called after two normalisations and after the addition."""

    def __init__(self, channels: int, slope: float | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.inner = self.relu if slope is None else nn.LeakyReLU(slope)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(self.bn1(self.conv1(x)))
        out = self.inner(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x
        y: Tensor = self.relu(out)
        return y


class Dense(nn.Module):
    """A block as in DenseNet: its input is normalised, and part of its output."""

    def __init__(self, channels: int, slope: float | None = None) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.relu1, self.relu2 = (nn.ReLU(True) if slope is None else nn.LeakyReLU(slope) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.relu1(self.norm1(x)))
        return torch.cat([x, self.conv2(self.relu2(self.norm2(h)))], 1)


class Untraceable(nn.Module):
    """A network whose forward looks at values."""

    def __init__(self, slope: float | None = None) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.relu = nn.ReLU() if slope is None else nn.LeakyReLU(slope)
        self.dense = Dense(8, slope)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn(self.conv(x)))
        y: Tensor = self.dense(h) if h.mean() > -100 else h
        return y


def stem_and(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks)


CASES: dict[str, tuple[Callable[[float | None], nn.Module], int, int, set[bool]]] = {
    # network with ReLU or with the slope of the converted activations, converted and all normalisations, overwrite
    "bottlenecks": (lambda slope: stem_and(*(Bottleneck(8, slope) for _ in range(2))), 4, 6, {True}),
    "dense": (lambda slope: stem_and(Dense(8, slope), Dense(12, slope)), 4, 4, {True, False}),
}
NAMED = [("bn", "relu")]


def quiet(text: str) -> None:
    """Print nothing."""


def randomised(network: nn.Module) -> nn.Module:
    """Return a network in float64 whose normalisations have weights of both signs, shifts and statistics."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.weight.copy_(torch.randn_like(module.weight).sign() * (0.5 + torch.rand_like(module.weight)))
                module.bias.normal_()
                module.running_mean.normal_()
    return network.double()


def trained(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return output, gradients and buffers after a step, and the output in evaluation."""
    network.train()
    for p in network.parameters():
        p.grad = None
    y = network(x.clone().requires_grad_())
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    found = {name: p.grad for name, p in network.named_parameters()} | dict(network.named_buffers())
    return {"y": y.detach(), **found, "evaluated": network.eval()(x).detach()}


def assert_same(network: nn.Module, reference: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(trained(network, x), trained(reference, x), rtol=1e-10, atol=1e-10)


def images(size: int = 8) -> Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_a_converted_network_equals_the_one_with_leaky_relu(name: str) -> None:
    torch.manual_seed(0)
    build, taken, norms, overwrites = CASES[name]
    network, reference = randomised(build(None)), build(0.01).double()
    reference.load_state_dict(network.state_dict())
    keys, parameters, messages = [*network.state_dict()], [*network.parameters()], list[str]()
    found = to_inplace_abn(network, report=messages.append)
    assert (len(found.taken), len(found.taken) + len(found.left)) == (taken, norms)
    assert {pair.overwrite for pair in found.taken} == overwrites
    assert [*network.state_dict()] == keys
    assert all(a is b for a, b in zip(network.parameters(), parameters, strict=True))  # an optimizer's are still the network's
    assert messages[0].startswith(f"InPlace-ABN: {taken} of {norms} batch normalisations\n")
    assert "ReLU has no inverse" in messages[0]
    assert_same(copy.deepcopy(network), reference, images())
    before = copy.deepcopy(network)
    to_batch_norm(network)
    assert not any(isinstance(module, InPlaceABN) for module in network.modules())
    assert_same(network, before, images())


def test_networks_of_the_package() -> None:
    """A root that can't be traced has blocks that can. Stored bytes fall by those of the outputs of the normalisations."""
    torch.manual_seed(0)
    x = images(16)
    for build, taken, norms in ((resnet50, 33, 53), (revnet38, 37, 37)):
        network: Any = build(width=0.125).build(0).double()
        bytes_before = kept_bytes(lambda network=network: network(x), network.parameters())
        found = to_inplace_abn(network, report=quiet)
        assert (len(found.taken), len(found.taken) + len(found.left)) == (taken, norms), str(found)
        assert kept_bytes(lambda network=network: network(x), network.parameters()) < 0.9 * bytes_before
        before = copy.deepcopy(network)
        to_batch_norm(network)
        assert_same(network, before, x)


def test_pairs_by_name_where_a_network_cannot_be_traced() -> None:
    torch.manual_seed(0)
    network, reference = randomised(Untraceable()), Untraceable(0.01).double()
    reference.load_state_dict(network.state_dict())
    assert to_inplace_abn(copy.deepcopy(network), report=quiet).left == {
        "bn": "it is in a module that can't be traced (name it in pairs)"
    }
    found = to_inplace_abn(network, NAMED, report=quiet)
    assert (len(found.taken), found.left) == (3, {})
    assert_same(network, reference, images())


class Kinds(nn.Module):
    """Normalisations that are left out, each for another reason."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 4, 4, 1) for i in range(7))
        self.small, self.gelu, self.function, self.read, self.hooked, self.shared = (nn.BatchNorm2d(4) for _ in range(6))
        self.plain, self.act = nn.BatchNorm2d(4, affine=False), nn.ReLU()
        self.acts = nn.ModuleList([nn.ReLU(), nn.GELU(), nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.ReLU()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.acts[0](self.small(self.convs[0](x)))
        x = self.acts[1](self.gelu(self.convs[1](x)))
        x = F.relu(self.function(self.convs[2](x)))
        h = self.read(self.convs[3](x))
        x = self.acts[2](h) + h
        x = self.acts[3](self.hooked(self.convs[4](x)))
        x = self.acts[5](self.plain(self.convs[6](x)))
        y: Tensor = self.shared(self.convs[5](self.acts[4](self.shared(x))))
        return y


def test_what_is_left_out_is_named_with_its_reason() -> None:
    network = Kinds()
    with torch.no_grad():
        network.small.weight[1:3] = torch.tensor([1e-7, 0.0])
    network.hooked.register_forward_hook(lambda *_: None)
    before = copy.deepcopy(network.state_dict())
    found = to_inplace_abn(network, report=quiet)
    assert found.left == {
        "small": "|γ| < eps in 2 of 4 channels",
        "gelu": "GELU follows",
        "function": "relu follows as a function, not as a module",
        "read": "2 operations read its output",
        "hooked": "it has hooks",
        "shared": "output follows",
        "plain": "it lacks weights, running statistics or a momentum",
    }
    assert not found.taken
    assert str(found).startswith("InPlace-ABN: 0 of 7 batch normalisations")
    torch.testing.assert_close(network.state_dict(), before)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("small", "acts.0"), r"pairs: small: expected a batch normalisation that can be inverted, got \|γ\| < eps in 4 of 4"),
        (("nothing", "act"), "pairs: nothing: expected a batch normalisation that can be inverted, got nothing of that name"),
        (("gelu", "acts.1"), r"pairs: acts\.1: expected ReLU or LeakyReLU without hooks, got GELU"),
    ],
)
def test_pairs_that_cannot_be_converted(pair: tuple[str, str], message: str) -> None:
    network = Kinds()
    nn.init.zeros_(network.small.weight)
    with pytest.raises(ModelError, match=message):
        to_inplace_abn(network, [pair], report=quiet)
    assert not any(isinstance(module, InPlaceABN) for module in network.modules())


def test_states_of_the_authors_package() -> None:
    """Their layer computes x̂ (|γ| + ε) + β, has no counter of batches, and was often saved inside a parallel wrapper."""
    torch.manual_seed(0)
    x, gamma, beta, mean, var = torch.randn(4, 3, 5), torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3) + 0.5
    state = {"module.0.weight": gamma, "module.0.bias": beta, "module.0.running_mean": mean, "module.0.running_var": var}
    layer = nn.Sequential(InPlaceABN(3)).eval()
    layer.load_state_dict(authors_state(state))
    columns = (t[:, None] for t in (mean, (var + 1e-5).rsqrt(), gamma.abs() + 1e-5, beta))
    centre, rate, scale, shift = columns
    torch.testing.assert_close(layer(x), F.leaky_relu((x - centre) * rate * scale + shift, 0.01))


def train_synchronized(rank: int) -> Conversion:
    """Compare a converted network under DDP, with shared statistics, with one process that has the whole batch."""
    torch.manual_seed(0)
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    network, reference = randomised(stem_and(Dense(8))), stem_and(Dense(8, 0.01)).double()
    reference.load_state_dict(network.state_dict())
    network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    found = to_inplace_abn(network, report=quiet)
    model = DistributedDataParallel(network, broadcast_buffers=False)
    model(x[3 * rank : 3 * rank + 3]).square().mean().backward()
    reference(x).square().mean().backward()
    for (name, p), q in zip(network.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-10, msg=name)
    torch.testing.assert_close(dict(network.named_buffers()), dict(reference.named_buffers()))
    assert dist.get_world_size(network[1].norm1.group) == 2
    return found


@pytest.mark.processes
def test_synchronized_over_data_parallel_processes(tmp_path: Path) -> None:
    found = run_processes(2, train_synchronized, tmp_path / "processes", timeout=60)
    assert all(len(each.taken) == 2 for each in found)
