"""Stages without a pipeline: gradients, stored activations, versions of weights and hooks, for each kind of block."""

import gc
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin

from petra import Keep, Numerics, Weights
from petra.engine.build import make_stage
from petra.reversible import Coupling
from tests.support.nets import branch


def test_generators_are_seeded_only_for_blocks_that_draw() -> None:
    """Each run finds again which blocks draw random numbers: a rate of dropout may have been 0 in the run before."""
    torch.manual_seed(0)
    functions = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(rate)) for rate in (0.0, 0.5)]
    made = make_stage([Coupling(f) for f in functions] + [nn.Bilinear(3, 3, 2)], [Keep.NOTHING] * 2 + [Keep.INPUT], first_block=1)
    x = (torch.randn(4, 3), torch.randn(4, 3))

    def backward_repeats_the_masks() -> bool:
        y = made.forward(7, x)
        found, _ = made.backward(7, y, (torch.ones_like(y[0]),))
        return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, x, strict=True))

    assert backward_repeats_the_masks()
    assert [runner.function.draws for runner in made.runners] == [False, True, False]
    functions[0][1].p = 0.5
    for runner in made.runners:
        runner.function.begin_run()
    assert backward_repeats_the_masks()
    assert [runner.function.draws for runner in made.runners] == [True, True, False]


def live_bytes() -> int:
    gc.collect()
    without_storage = (FakeTensor, UninitializedTensorMixin)
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and not isinstance(t, without_storage)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_reversible_blocks_store_nothing_and_others_their_inputs_in_flight() -> None:
    x = (torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8))
    made = make_stage([Coupling(branch(4)) for _ in range(3)], [Keep.NOTHING] * 3, first_block=1)
    before = live_bytes()
    for m in range(6):
        made.forward(m, x)
    assert live_bytes() == before
    assert made.stored_bytes() == 0
    assert not any(runner.stored for runner in made.runners)

    made, one, outputs = make_stage([nn.Conv2d(4, 4, 3, padding=1)], [Keep.INPUT], first_block=1), 4 * 4 * 8 * 8 * 4, {}
    before = live_bytes()
    for m in range(6):
        outputs[m] = made.forward(m, (torch.randn(4, 4, 8, 8),))
        assert made.stored_bytes() == (m + 1) * one
    delta = tuple(torch.ones_like(t) for t in outputs.pop(0))
    outputs.clear()
    assert live_bytes() - before == 6 * one + delta[0].nbytes
    made.backward(0, (), delta)
    assert made.stored_bytes() == 5 * one


@pytest.mark.parametrize(("optimizer", "kernel"), [(torch.optim.SGD, "fused"), (torch.optim.AdamW, "foreach")])
def test_a_stored_graph_uses_the_updated_weights(optimizer: type[torch.optim.Optimizer], kernel: str) -> None:
    """Old activations and new weights, through convolution and batch normalisation, with each kind of optimizer kernel."""
    torch.manual_seed(1)
    block = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).double()
    block.to(memory_format=torch.channels_last)
    x, delta = torch.randn(2, 3, 5, 5, dtype=torch.float64), torch.randn(2, 2, 5, 5, dtype=torch.float64)
    made = make_stage([block], [Keep.GRAPH], first_block=1, numerics=Numerics(channels_last=True))
    made.forward(0, (x,))
    made.forward(1, (torch.randn_like(x),))  # updates the running statistics
    with torch.no_grad():
        hidden = block[0](x)
        mean, variance = (f(hidden, dim=(0, 2, 3), keepdim=True) for f in (torch.mean, partial(torch.var, correction=0)))
    for p in block.parameters():
        p.grad = torch.randn_like(p)
    with made.updating():
        optimizer(block.parameters(), lr=0.1, **{kernel: True}).step()  # type: ignore[call-arg]
    _, (dx,) = made.backward(0, (), (delta,))

    conv, norm, last = block
    dh = torch.einsum("boyx,oi->biyx", delta, last.weight[:, :, 0, 0]) * norm.weight.view(1, -1, 1, 1)
    normal, scale = (hidden - mean) / (variance + norm.eps).sqrt(), (variance + norm.eps).sqrt()
    centred = dh - dh.mean((0, 2, 3), keepdim=True) - normal * (dh * normal).mean((0, 2, 3), keepdim=True)
    expected = torch.nn.grad.conv2d_input(x.shape, conv.weight, centred / scale, padding=1)
    torch.testing.assert_close(dx, expected, rtol=1e-9, atol=1e-11)


class Converted(nn.Module):
    """Returns its input in a memory format."""

    def __init__(self, form: torch.memory_format) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.contiguous(memory_format=self.form)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("keep", [Keep.NOTHING, Keep.INPUT])
def test_streams_keep_their_layout_whatever_a_block_returns(keep: Keep, channels_last: bool) -> None:
    own, other = (torch.channels_last, torch.contiguous_format)[:: 1 if channels_last else -1]
    block = Coupling(Converted(other)) if keep is Keep.NOTHING else Converted(other)
    made = make_stage([block], [keep], first_block=1, numerics=Numerics(channels_last=channels_last))
    x = tuple(torch.randn(2, 3, 4, 5).contiguous(memory_format=own) for _ in range(2 if keep is Keep.NOTHING else 1))
    y = made.forward(0, x)
    inputs, dx = made.backward(0, y, tuple(torch.ones_like(t).contiguous(memory_format=other) for t in y))
    assert all(t.is_contiguous(memory_format=own) for t in (*y, *inputs, *dx))


def test_double_weights_are_two_versions() -> None:
    """Only one version exists besides the parameters, however many microbatches are in flight."""
    made = make_stage([nn.Linear(500, 500)], [Keep.INPUT], weights=Weights.DOUBLE, first_block=1, k=2)
    size, x = 500 * 501 * 4, torch.randn(2, 500)
    before = live_bytes()
    for m in range(8):
        y = made.forward(m, (x,))
        if m >= 2:
            made.backward(m - 2, (), y)
            if m % 2:
                with made.updating():
                    pass
    assert size <= live_bytes() - before < 1.5 * size
