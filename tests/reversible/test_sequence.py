"""Reversible sequences in a training loop of anybody's: what changes between the passes, hooks, wrappers and transforms of torch.

The table of docs/reversible_layers.md names these tests.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from petra.errors import ModelError
from petra.reversible import Coupling, ReversibleSequence, TwoFunctionCoupling
from tests.structure import ROOT
from tests.support.processes import environment, run_processes


def branch() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))


def smooth() -> nn.Module:
    """Return a branch without buffers, which ``fully_shard`` does not convert."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class Network(nn.Module):
    """Stem, reversible layers and head, as in a script of anybody's."""

    def __init__(self, make: Callable[[], nn.Module] = branch) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        blocks = [Coupling(make()), TwoFunctionCoupling(make(), make()), Coupling(make())]
        self.layers = ReversibleSequence(blocks)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        logits: Tensor = self.head(torch.cat(self.layers(h, h.cos()), 1))
        return logits


class Plain(Network):
    """The same network with ordinary autograd, which is the reference of all tests."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        streams = h, h.cos()
        for block in self.layers.blocks:
            streams = block(*streams)
        logits: Tensor = self.head(torch.cat(streams, 1))
        return logits


def pair(make: Callable[[], nn.Module] = branch) -> tuple[Network, Plain]:
    """Return a network and its reference, with the same weights in float64."""
    torch.manual_seed(0)
    network, plain = Network(make).double(), Plain(make).double()
    plain.load_state_dict(network.state_dict())
    return network, plain


def data(seed: int = 0, rows: int = 5) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss(y: Tensor) -> Tensor:
    return y.square().sum() + y.sin().sum()


def assert_same(network: nn.Module, plain: nn.Module, tolerance: float = 1e-9) -> None:
    """Assert that gradients and buffers are equal."""
    for (name, p), q in zip(network.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dict(network.named_buffers()), dict(plain.named_buffers()))


def plain_pair() -> tuple[Tensor, Tensor]:
    x1, x2 = torch.randn(2, 2, 5, 4)
    return x1, x2


STUMBLES: dict[str, tuple[Callable[[], Any], str]] = {
    "a plain module": (lambda: ReversibleSequence([nn.Linear(4, 4)]), "block 0: expected a reversible block, such as Coupling"),
    "a function": (lambda: Coupling(lambda x: x), "f: expected a module, got function"),  # type: ignore[arg-type]
    "several outputs": (
        lambda: ReversibleSequence([Coupling(nn.GRU(4, 4))])(*plain_pair()),
        r"f: expected a function with outputs of the shape of its stream, \[2, 5, 4\], got tuple",
    ),
}


@pytest.mark.parametrize("name", STUMBLES)
def test_what_newcomers_try(name: str) -> None:
    call, message = STUMBLES[name]
    with pytest.raises(ModelError, match=message):
        call()


# What changes between the forward and the backward pass


class Scaled(nn.Module):
    """A layer with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale)


@torch.no_grad()
def multiply(tensor: Tensor) -> None:
    tensor.mul_(1.1)


def load(network: Network) -> None:
    network.layers.load_state_dict({key: value + 1 for key, value in network.layers.state_dict().items()})


def step(network: Network) -> None:
    network.layers.zero_grad()
    optimizer = torch.optim.SGD(network.layers.parameters(), lr=0.1)
    network.layers.blocks[0].f.linear.weight.grad = torch.ones(8, 8, dtype=torch.float64)
    optimizer.step()


def assign(network: Network) -> None:
    parameter = network.layers.blocks[0].f.linear.weight
    parameter.data = parameter.data * 1.1


def replace(network: Network) -> None:
    network.layers.load_state_dict(copy.deepcopy(network.layers.state_dict()), assign=True)


CHANGES: dict[str, tuple[Callable[[Network], object], str]] = {
    "a weight": (lambda n: multiply(n.layers.blocks[0].f.linear.weight), "f.linear.weight of block 0"),
    "a weight of the second function of a two-function coupling": (
        lambda n: multiply(n.layers.blocks[1].g.linear.weight),
        "g.linear.weight of block 1",
    ),
    "a buffer": (lambda n: multiply(n.layers.blocks[2].f.scale), "f.scale of block 2"),
    "a step of the optimizer": (step, "f.linear.weight of block 0"),
    "loading weights": (load, "block 2"),
    "an assignment of .data": (assign, "f.linear.weight of block 0"),
    "other parameters": (replace, "block 2"),
    "evaluation mode": (lambda n: n.eval(), "block 2"),
    "freezing a weight": (lambda n: n.layers.blocks[0].requires_grad_(False), "f.linear.weight of block 0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_before_the_backward_pass_raises_as_in_autograd(name: str) -> None:
    network, _ = pair(Scaled)
    change, named = CHANGES[name]
    value = loss(network(data()))
    change(network)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        value.backward()
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


class Conditioned(nn.Linear):
    """Reads a tensor that another module has made."""

    memory: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) + self.memory)


def test_a_function_that_reads_another_tensor_with_a_gradient_is_refused() -> None:
    """Its gradient would be left out. So it is each time, also after an evaluation."""
    encoder, f, x = nn.Linear(3, 8), Conditioned(8, 8), torch.randn(2, 8)
    f.memory = encoder(torch.ones(2, 3))
    layers = ReversibleSequence([Coupling(f)])
    with torch.no_grad():
        layers(x, x)
    for _ in range(2):
        y1, y2 = layers(x, x)
        with pytest.raises(ModelError, match=r"^f: expected a function of its input and .*, of shapes \[\[8, 3\], \[8\]\]$"):
            (y1 + y2).sum().backward()
    f.memory = f.memory.detach()
    y1, y2 = layers(x, x)
    (y1 + y2).sum().backward()


class Energy(nn.Linear):
    """Differentiates in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.requires_grad_() if x.is_leaf else x
            return torch.autograd.grad(super().forward(x).cos().sum(), x, create_graph=True)[0]


def test_a_function_may_differentiate() -> None:
    torch.manual_seed(0)
    network, plain = pair(lambda: Energy(8, 8))
    for each in (network, plain):
        loss(each(data())).backward()
    torch.testing.assert_close([p.grad for p in network.parameters()], [p.grad for p in plain.parameters()])


def test_a_new_function_of_a_block_is_used() -> None:
    block, x = TwoFunctionCoupling(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    block.f, block.g = smooth(), smooth()
    y1, y2 = ReversibleSequence([block])(x, x)
    torch.testing.assert_close((y1, y2), (x + block.f(x), x + block.g(x + block.f(x))))
    (y1.sum() + y2.square().sum()).backward()
    assert all(p.grad is not None for p in block.parameters())


def test_running_statistics_in_evaluation_mode_must_not_change() -> None:
    network, _ = pair()
    value = loss(network.eval()(data()))
    multiply(network.layers.blocks[0].f[1].running_var)
    with pytest.raises(RuntimeError, match=r"f\.1\.running_var of block 0"):
        value.backward()


def test_weights_of_a_functional_call_are_missed_in_the_backward_pass() -> None:
    network, _ = pair()
    weights = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}
    value = loss(torch.func.functional_call(network, weights, (data(),)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


# What may change


def test_statistics_move_once_in_two_passes_and_in_a_repeated_backward_pass() -> None:
    network, plain = pair()
    for model in (network, plain):
        first, second = loss(model(data(1))), loss(model(data(2)))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
    for (name, p), q in zip(network.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9, msg=name)
    for (name, a), b in zip(network.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_statistics_of_frozen_blocks_move() -> None:
    network, plain = pair()
    for model in (network, plain):
        model.stem.requires_grad_(False)
        model.layers.blocks[0].requires_grad_(False)
        loss(model(data())).backward()
    torch.testing.assert_close(dict(network.named_buffers()), dict(plain.named_buffers()))
    assert torch.equal(network.head.weight.grad, plain.head.weight.grad)


# Hooks


def test_hooks_of_blocks_see_the_graph() -> None:
    network, plain = pair()
    seen: dict[str, list[Any]] = {"forward": [], "backward": [], "plain": []}
    block = network.layers.blocks[1]
    block.register_forward_hook(lambda module, x, y: seen["forward"].append(y[0].requires_grad))
    block.register_full_backward_hook(lambda module, dx, dy: seen["backward"].append((*dx, *dy)))
    plain.layers.blocks[1].register_full_backward_hook(lambda module, dx, dy: seen["plain"].append((*dx, *dy)))
    for model in (network, plain):
        loss(model(data())).backward()
    assert seen["forward"] == [True]
    torch.testing.assert_close(seen["backward"], seen["plain"], rtol=1e-9, atol=1e-9)
    assert_same(network, plain)
    assert "forward" not in vars(block)


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_a_hook_that_replaces_a_stream_is_refused(kind: str) -> None:
    network, _ = pair()
    hooks = {"forward": lambda module, x, y: (y[0], 2 * y[1]), "forward_pre": lambda module, x: (x[0], 2 * x[1])}
    getattr(network.layers.blocks[1], f"register_{kind}_hook")(hooks[kind])
    with pytest.raises(ModelError, match="block 1: expected hooks that leave its input and output as they are"):
        network(data())


def test_hooks_of_parameters_see_each_backward_pass() -> None:
    network, plain = pair()
    calls: dict[str, list[Tensor]] = {"hook": [], "post": [], "plain": []}
    weight, reference = network.layers.blocks[0].f[0].weight, plain.layers.blocks[0].f[0].weight
    weight.register_hook(lambda gradient: calls["hook"].append(gradient) or 2 * gradient)
    weight.register_post_accumulate_grad_hook(lambda p: calls["post"].append(p.grad / 2))
    reference.register_hook(lambda gradient: calls["plain"].append(gradient) or 2 * gradient)
    for model in (network, plain):
        loss(model(data())).backward()
    assert_same(network, plain)
    torch.testing.assert_close(calls["hook"], calls["plain"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(calls["post"], calls["plain"], rtol=1e-9, atol=1e-9)


# Loops


def test_accumulation_over_microbatches() -> None:
    network, plain = pair()
    for model in (network, plain):
        for seed in range(3):
            (loss(model(data(seed))) / 3).backward()
    assert_same(network, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_the_sequence(reentrant: bool) -> None:
    network, plain = pair(Scaled)
    x = data().requires_grad_()
    loss(checkpoint(network, x, use_reentrant=reentrant)).backward()
    loss(plain(data())).backward()
    assert_same(network, plain)


def test_autocast_and_scaled_losses() -> None:
    torch.manual_seed(0)
    network, plain = Network(Scaled), Plain(Scaled)
    plain.load_state_dict(network.state_dict())
    for model in (network, plain):
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for seed in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(model(data(seed).float()).float())
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 1024
    for (name, p), q in zip(network.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.02, atol=0.02, msg=name)


def test_a_copy_trains_on_its_own() -> None:
    network, plain = pair()
    twin = copy.deepcopy(network)
    loss(network(data(3))).backward()
    for model in (twin, plain):
        loss(model(data())).backward()
    assert_same(twin, plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients(mode: Callable[[], Any]) -> None:
    network, plain = pair()
    with mode():
        assert torch.equal(network.eval()(data()), plain.eval()(data()))


# Wrappers


@pytest.mark.parametrize("whole", [True, False])
def test_compiled(whole: bool) -> None:
    network, plain = pair()
    compiled: Any = network
    if whole:
        compiled = torch.compile(network, backend="eager")
    else:
        for block in network.layers.blocks:
            block.f.compile(backend="eager")
    loss(compiled(data())).backward()
    loss(plain(data())).backward()
    assert_same(network, plain)


def train_wrapped(rank: int, kind: str) -> None:
    """Train a wrapped network in two processes, and compare it with the mean gradient of plain networks."""
    network, plain = pair(smooth if kind == "sharded in float32" else branch)
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,))}
    if kind == "sharded in float32":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32)
    model: Any = network
    if kind in ("ddp", "static graph"):
        model = DistributedDataParallel(network, static_graph=kind == "static graph")
    else:
        for block in network.layers.blocks if kind != "sharded whole" else ():
            fully_shard(block, reshard_after_forward=kind != "sharded, kept", **options)
        fully_shard(network, **options)
    optimizer, reference = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    tolerance = 1e-3 if "float32" in kind else 1e-8
    for seed in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        for part in range(2):  # two microbatches
            x = data(4 * seed + 2 * part + rank)
            loss(model(x)).backward()
            loss(plain(x)).backward()
        for p, q in zip(network.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            dist.all_reduce(q.grad)
            whole = p.grad if kind in ("ddp", "static graph") else p.grad.full_tensor()
            torch.testing.assert_close(whole.double(), q.grad / 2, rtol=tolerance, atol=tolerance)
            q.grad /= 2
        optimizer.step()
        reference.step()


KINDS = ("ddp", "static graph", "sharded whole", "each block sharded", "sharded, kept", "sharded in float32")


def train_all(rank: int) -> None:
    for kind in KINDS:
        started = time.monotonic()
        train_wrapped(rank, kind)
        print(kind, time.monotonic() - started)
    network, _ = pair()
    fully_shard(network.layers.blocks[0].f, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ModelError, match=r"block 0: expected fully_shard of the whole block, got fully_shard of its \['f'\]"):
        network(data())


@pytest.mark.processes
def test_data_parallel_wrappers(tmp_path: Path) -> None:
    """DDP, its static graph, and ``fully_shard`` of the whole network and of each block, with accumulation."""
    run_processes(2, train_all, tmp_path / "processes", timeout=120)


def test_a_replica_of_data_parallel_is_refused() -> None:
    network, _ = pair()
    replica = network.layers._replicate_for_data_parallel()
    with pytest.raises(ModelError, match="ReversibleSequence: expected DistributedDataParallel, got DataParallel"):
        replica(*torch.randn(2, 4, 8).double())


# Transforms


def test_transforms_of_torch_func_use_plain_autograd() -> None:
    network, plain = pair(Scaled)

    def value(parameters: dict[str, Tensor], model: nn.Module) -> Tensor:
        return loss(torch.func.functional_call(model, parameters, (data(),)))

    found, expected = (torch.func.grad(value)(dict(model.named_parameters()), model) for model in (network, plain))
    torch.testing.assert_close(found, expected)
    found, expected = (torch.func.jvp(model, (data(1),), (data(2),)) for model in (network, plain))
    torch.testing.assert_close(found, expected)


def test_second_derivatives_are_refused() -> None:
    network, _ = pair()
    x = data().requires_grad_()
    (dx,) = torch.autograd.grad(loss(network(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice") as caught:
        dx.square().sum().backward()
    assert "\n" not in str(caught.value)


def test_exported_in_evaluation_mode() -> None:
    network, plain = pair()
    program = torch.export.export(network.eval(), (data(),))
    torch.testing.assert_close(program.module()(data(1)), plain.eval()(data(1)))
    traced = torch.jit.trace(network, (data(),), check_trace=False)
    torch.testing.assert_close(traced(data(1)), plain(data(1)))


@pytest.mark.processes
def test_the_layers_load_torch_only() -> None:
    """Petra's requirements are needed for its commands only; modules that torch itself may import don't count."""
    program = (
        "import sys, torch, numpy; before = {*sys.modules}; import petra.reversible;"
        "print(*sorted({name.partition('.')[0] for name in {*sys.modules} - before} - {*sys.stdlib_module_names}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.split() == ["petra"]


# The page


PAGE = (ROOT / "docs" / "reversible_layers.md").read_text(encoding="utf-8")


def test_the_table_of_the_page_names_tests_of_this_file() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) >= 15
    assert named <= {*globals()}


LIBRARIES: dict[str, tuple[str, str]] = {
    # keys of block 1: its first function, its second one (RevLib's functions are blocks of their own)
    "RevTorch": ("reversible_blocks.1.f_block.", "reversible_blocks.1.g_block."),
    "memcnn": ("1._fn.Fm.", "1._fn.Gm."),
    "RevLib": ("0-1.wrapped_module.wrapped_module.", "1-0.wrapped_module.wrapped_module."),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_states_of_other_libraries(name: str) -> None:
    """Keys as their newest releases write them. All compute y1 = x1 + f(x2), y2 = x2 + g(y1)."""
    torch.manual_seed(0)
    f, g, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 3, 4)
    (code,) = re.findall(r"```python\n(import re\n.*?)```", PAGE, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    kind: Any = Coupling if name == "RevLib" else TwoFunctionCoupling
    layers = ReversibleSequence(kind(*(nn.Linear(4, 4) for _ in range(1 + (kind is TwoFunctionCoupling)))) for _ in range(3))
    first, second = LIBRARIES[name]
    state = {f"{first}{key}": value for key, value in f.state_dict().items()}
    state |= {f"{second}{key}": value for key, value in g.state_dict().items()}
    layers.load_state_dict({scope["renamed"](key): value for key, value in state.items()}, strict=False)
    y1 = x[0] + f(x[1])
    streams: Any = (x[0], x[1])
    for block in (layers.blocks[1], layers.blocks[2]) if name == "RevLib" else (layers.blocks[1],):
        streams = block(*streams)
    torch.testing.assert_close(streams, (y1, x[1] + g(y1)))
