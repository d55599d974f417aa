"""Sums in the memory of a function's output: only if nothing else reads it, and in the memory format of the streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from petra.reversible import Coupling, ReversibleSequence, coupling


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse the memory of small tensors too."""
    monkeypatch.setattr(coupling, "SMALL", 0)


class Function(nn.Module):
    """A convolution, and then any function of (itself, convolved, input). Records the address of its output."""

    def __init__(self, after: Callable[[Function, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.after = nn.Conv2d(4, 4, 3, padding=1), after
        self.offset = nn.Parameter(torch.randn(2, 4, 5, 5))
        self.addresses: list[int] = []
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.after(self, self.conv(x), x)
        self.addresses.append(out.data_ptr())
        return out


def keep(module: Function, convolved: Tensor, x: Tensor) -> Tensor:
    module.seen.append(convolved)
    return convolved


def keep_view(module: Function, convolved: Tensor, x: Tensor) -> Tensor:
    module.seen.append(convolved[:1])
    return convolved


OTHERS_READ: dict[str, Callable[[Function, Tensor, Tensor], Tensor]] = {
    "kept by the module": keep,
    "view kept by the module": keep_view,
    "its parameter": lambda module, convolved, x: module.offset,
    "its input": lambda module, convolved, x: x,
    "view of its input": lambda module, convolved, x: x.view_as(x),
    "expanded": lambda module, convolved, x: convolved[:1].expand_as(convolved),
    "half of a larger tensor": lambda module, convolved, x: torch.cat([convolved, convolved])[:2],
}


def streams(channels_last: bool = False) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x1, x2 = torch.randn(2, 2, 4, 5, 5)
    if channels_last:
        x1, x2 = (x.contiguous(memory_format=torch.channels_last) for x in (x1, x2))
    return x1, x2


def test_sums_reuse_the_memory_of_the_output() -> None:
    block, x = Coupling(Function(lambda module, convolved, x: convolved)), streams()
    with torch.no_grad():
        y = block(*x)
        assert y[1].data_ptr() == block.f.addresses[-1]
        dy = torch.randn_like(x[0]), torch.randn_like(x[1])
        (x1, x2), (dx1, _), _ = block.inverse_vjp(y, dy)
    assert x1.data_ptr() == block.f.addresses[-1]
    assert dx1 is dy[1]
    torch.testing.assert_close((x1, x2), x)


@pytest.mark.parametrize("name", [*OTHERS_READ, "saved for its gradient"])
def test_memory_that_others_read_is_not_written(name: str) -> None:
    """Outputs, reconstructed inputs and gradients are those of plain autograd, and what the module keeps has its values."""
    after = OTHERS_READ.get(name, lambda module, convolved, x: convolved.exp())
    block, x = Coupling(Function(after)), streams()
    leaves = [t.clone().requires_grad_() for t in x]
    expected = block(*leaves)
    dy = torch.randn(2, *expected[0].shape).unbind()
    expected_dx = torch.autograd.grad(expected, leaves, dy, retain_graph=True)
    expected_gradients = torch.autograd.grad(expected, list(block.parameters()), dy, allow_unused=True)
    parameters = [p.detach().clone() for p in block.parameters()]
    block.f.seen.clear()
    with torch.no_grad():
        y = block(*x)
        copies, passed = [t.clone() for t in block.f.seen], tuple(g.clone() for g in dy)
        found, dx, gradients = block.inverse_vjp(y, passed)
    for kept, values in zip(block.f.seen, copies, strict=False):
        assert torch.equal(kept, values)
    if name.endswith("kept by the module"):
        assert not any(t.data_ptr() in (y[1].data_ptr(), found[0].data_ptr()) for t in block.f.seen)
    torch.testing.assert_close(y, tuple(t.detach() for t in expected))
    torch.testing.assert_close(found, x)
    torch.testing.assert_close(dx, expected_dx)
    assert all(torch.equal(a, b) for a, b in zip(passed, dy, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(block.parameters(), parameters, strict=True))
    for p, g in zip(block.parameters(), expected_gradients, strict=True):
        torch.testing.assert_close(gradients.get(p), g)


def test_without_counts_nothing_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    block, x = Coupling(Function(lambda module, convolved, x: convolved)), streams()
    with torch.no_grad():
        y = block(*x)
        assert y[1].data_ptr() != block.f.addresses[-1]


def test_gradients_have_the_format_of_the_streams() -> None:
    """The loss returns contiguous gradients of channels-last streams; no block after the last one sees them."""
    blocks = [Coupling(Function(lambda module, convolved, x: convolved)) for _ in range(3)]
    sequence = ReversibleSequence(blocks).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    formats = []

    def record(module: nn.Module, found: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> None:
        formats.extend(t.is_contiguous(memory_format=torch.channels_last) for t in (*found, *given) if t is not None)

    for block in blocks:
        block.f.conv.register_full_backward_hook(record)  # type: ignore[arg-type]
    y = sequence(*(x.requires_grad_() for x in streams(channels_last=True)))
    torch.autograd.backward(y, torch.randn(2, 2, 4, 5, 5).unbind())
    assert len(formats) == 6
    assert all(formats)
