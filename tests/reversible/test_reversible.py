"""Reversible blocks against plain autograd, and sequences of them on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from petra.reversible import (
    Coupling,
    ReversibleBlock,
    ReversibleSequence,
    TwoFunctionCoupling,
    derive_seed,
    frozen_statistics,
    normalisations,
    seeded,
)
from petra.reversible.replay import autocast_to
from tests.support.nets import assert_equal, branch


def pair(channels: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x1, x2 = torch.randn(2, 3, channels, 6, 6, generator=generator, dtype=dtype)
    return x1, x2


def blocks(dropout: float = 0.0) -> list[ReversibleBlock]:
    torch.manual_seed(0)
    made = [Coupling(branch(4, dropout)), TwoFunctionCoupling(branch(4, dropout), branch(4, dropout))]
    return [block.double() for block in made]


@pytest.mark.parametrize("index", [0, 1])
def test_inverse_and_fused_backward_equal_plain_autograd(index: int) -> None:
    block = blocks(dropout=0.4)[index]
    plain = copy.deepcopy(block)
    x = tuple(t.requires_grad_() for t in pair())
    y = plain(*x, seed=3)
    dy = tuple(torch.randn_like(t) for t in y)
    expected = torch.autograd.grad(y, [*x, *plain.parameters()], dy)

    with torch.no_grad(), frozen_statistics(normalisations(block)):
        y = block(*x, seed=3)
    inputs = tuple(t.detach() for t in x)
    torch.testing.assert_close(block.inverse(*y, seed=3), inputs, rtol=1e-12, atol=1e-12)
    found_x, found_dx, gradients = block.inverse_vjp(y, dy, seed=3)
    found = (*found_dx, *(gradients[p] for p in block.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found_x, inputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dict(block.named_buffers()), dict(plain.named_buffers()))  # statistics were updated exactly once


def test_backward_evaluates_each_function_once() -> None:
    block, calls = TwoFunctionCoupling(branch(4), branch(4)).double(), list[nn.Module]()
    y = block(*pair())
    for function in (block.f, block.g):
        function.register_forward_hook(lambda module, x, out: calls.append(module))
    block.inverse_vjp(y, pair())
    assert sorted(calls, key=id) == sorted([block.f, block.g], key=id)


def test_seeded_repeats_numbers_and_restores_the_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeded(1):
        first = torch.rand(3)
    with seeded(1):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(3), expected)


def test_sequence_equals_plain_autograd() -> None:
    *kept, last = blocks(dropout=0.4)
    sequence = ReversibleSequence([*kept, *blocks(dropout=0.4)[:2], last])
    plain = copy.deepcopy(sequence)
    x = tuple(t.requires_grad_() for t in pair())
    torch.manual_seed(11)
    y = sequence(*x)
    (y[0] * y[1].sin()).sum().backward()
    found = tuple([*(t.grad for t in x), *(p.grad for p in sequence.parameters())])

    torch.manual_seed(11)
    seed = int(torch.randint(1 << 62, ()))
    streams = x
    for i, block in enumerate(plain.blocks):
        streams = block(*streams, seed=derive_seed(seed, i))
    expected = torch.autograd.grad((streams[0] * streams[1].sin()).sum(), [*x, *plain.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(dict(sequence.named_buffers()), dict(plain.named_buffers()))


def test_sequence_gives_parameter_gradients_to_an_input_that_needs_none() -> None:
    """And does not modify the caller's tensors."""
    sequence, x = ReversibleSequence(blocks()), pair()
    y = sequence(*x)
    copies = [t.detach().clone() for t in (*x, *y)]
    sum(t.square().sum() for t in y).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in sequence.parameters())
    assert all(torch.equal(tensor, expected) for tensor, expected in zip([*x, *y], copies, strict=True))


def test_sequence_detects_an_output_modified_before_backward() -> None:
    y1, y2 = ReversibleSequence(blocks())(*pair())
    loss = (y1 * y2).sum()
    with torch.no_grad():
        y2.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("depth", [2, 12])
def test_sequence_stores_only_its_output(depth: int) -> None:
    saved: list[Tensor] = []
    sequence = ReversibleSequence([Coupling(branch(4)) for _ in range(depth)]).double()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = sequence(*pair())
    assert sum(t.nbytes for t in saved) == sum(t.nbytes for t in y)


class FullPrecision(nn.Module):
    """Module that disables autocast in its forward, and therefore in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(x.float() @ self.weight)


def test_backward_runs_outside_autocast_as_plain_autograd_does() -> None:
    torch.manual_seed(0)
    sequence = ReversibleSequence([Coupling(FullPrecision()) for _ in range(2)])
    plain, x = copy.deepcopy(sequence), torch.randn(2, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = sequence(x[0], x[1])
        expected = plain.blocks[1](*plain.blocks[0](x[0], x[1]))
    for y in (found, expected):
        y[1].square().sum().backward()
    for a, b in zip(sequence.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


class Function(nn.Module):
    """A convolution, and then any function of (itself, convolved, input)."""

    def __init__(self, after: Callable[[Function, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.after = nn.Conv2d(4, 4, 3, padding=1), after
        self.offset = nn.Parameter(torch.randn(2, 4, 5, 5))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, self.conv(x), x)


def keep(module: Function, convolved: Tensor, x: Tensor) -> Tensor:
    module.seen.append(convolved)
    return convolved


OTHERS_READ: dict[str, Callable[[Function, Tensor, Tensor], Tensor]] = {
    "kept by the module": keep,
    "its parameter": lambda module, convolved, x: module.offset,
    "its input": lambda module, convolved, x: x,
    "expanded": lambda module, convolved, x: convolved[:1].expand_as(convolved),
    "half of a larger tensor": lambda module, convolved, x: torch.cat([convolved, convolved])[:2],
    "saved for its gradient": lambda module, convolved, x: convolved.exp(),
}


@pytest.mark.parametrize("name", OTHERS_READ)
def test_memory_that_others_read_is_not_written(name: str) -> None:
    """Outputs, reconstructed inputs and gradients are those of plain autograd, and what the module keeps has its values."""
    torch.manual_seed(0)
    block, x = Coupling(Function(OTHERS_READ[name])), torch.randn(2, 2, 4, 5, 5).unbind()
    leaves = [t.clone().requires_grad_() for t in x]
    expected = block(*leaves)
    dy = torch.randn(2, *expected[0].shape).unbind()
    expected_dx = torch.autograd.grad(expected, leaves, dy, retain_graph=True)
    expected_gradients = torch.autograd.grad(expected, list(block.parameters()), dy, allow_unused=True)
    parameters = copy.deepcopy(block.state_dict())
    block.f.seen.clear()
    with torch.no_grad():
        y = block(*x)
        copies, passed = copy.deepcopy(block.f.seen), copy.deepcopy(dy)
        found, dx, gradients = block.inverse_vjp(y, passed)
    assert_equal(block.f.seen[: len(copies)], copies)
    torch.testing.assert_close(y, tuple(t.detach() for t in expected))
    torch.testing.assert_close(found, x)
    torch.testing.assert_close(dx, expected_dx)
    assert_equal(passed, dy)
    assert_equal(block.state_dict(), parameters)
    for p, g in zip(block.parameters(), expected_gradients, strict=True):
        torch.testing.assert_close(gradients.get(p), g)


def test_autocast_reads_weights_that_have_changed() -> None:
    """torch would keep the cast of a weight that requires a gradient until the region ends."""
    linear, x = nn.Linear(4, 4), torch.ones(1, 4)
    with autocast_to("cpu", torch.bfloat16):
        before = linear(x)
        with torch.no_grad():
            linear.weight.add_(1)
        assert (linear(x) - before).mean() > 3
