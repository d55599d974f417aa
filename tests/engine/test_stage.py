"""Stages without a pipeline: gradients, stored activations, versions of weights and hooks, for each kind of block."""

import gc
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin

from petra import Keep, Numerics, Weights
from petra.engine.options.simple_stage import simple_stage
from petra.engine.stage import Stage
from petra.method import METHODS
from petra.model import Chain, Model
from petra.reversible import Coupling, Gradients, ReversibleBlock, derive_seed, seeded
from petra.specs import Streams
from tests.support.nets import RandomSource, branch, mixed_net

KEEPS = [Keep.GRAPH, Keep.INPUT, Keep.NOTHING]


def stage(model: Model, keep: Keep, weights: Weights = Weights.CURRENT, k: int = 1, seed: int = 4) -> Stage:
    blocks = [model.build_block(i, seed) for i in range(len(model.blocks))]
    reversible = [isinstance(b, Coupling) or hasattr(b, "_halves") for b in blocks]
    keeps = [Keep.INPUT if keep is Keep.NOTHING and not r else keep for r in reversible]
    return simple_stage(blocks, keeps, weights=weights, k=k, seed=seed)


def replayed(chain: Chain, m: int, x: Tensor, seed: int = 4) -> Tensor:
    """Return the output under plain autograd, with the random numbers that the engine draws."""
    streams: Streams = (x,)
    for i, block in enumerate(chain.children()):
        block_seed = derive_seed(derive_seed(seed, i), m)
        if isinstance(block, Coupling) or hasattr(block, "_halves"):
            streams = block(*streams, seed=block_seed)
        else:
            with seeded(block_seed):
                out = block(*streams)
            streams = out if isinstance(out, tuple) else (out,)
    return streams[0]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("weights", list(Weights))
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_of_frozen_weights_equals_plain_autograd(keep: Keep, weights: Weights, dropout: float) -> None:
    """Gradients, dropout masks and running statistics, with five microbatches in flight."""
    model, data, k = mixed_net(dropout=dropout), RandomSource(), 5
    made, chain = stage(model, keep, weights, k=k), model.build(4)
    outputs = [made.forward(m, (data.inputs(m),)) for m in range(k)]
    deltas = [torch.randn_like(y) for (y,) in outputs]
    for m in range(k):
        made.backward(m, outputs[m], (deltas[m],))
    for m in range(k):
        y = replayed(chain, m, data.inputs(m))
        torch.testing.assert_close(outputs[m][0], y.detach(), rtol=1e-12, atol=1e-12)
        y.backward(deltas[m] / k)
    for (name, p), q in zip(chain.named_parameters(), made.module.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-11, msg=name)
    for (name, a), b in zip(chain.named_buffers(), made.module.buffers(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12, msg=f"{name}: running statistics")


def test_generators_are_seeded_only_for_blocks_that_draw() -> None:
    """Each run finds again which blocks draw random numbers: a rate of dropout may have been 0 in the run before."""
    torch.manual_seed(0)
    functions = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(rate)) for rate in (0.0, 0.5)]
    made = simple_stage([Coupling(f) for f in functions] + [nn.Bilinear(3, 3, 2)], [Keep.NOTHING] * 2 + [Keep.INPUT], first_block=1)
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


class Offset(ReversibleBlock):
    """A reversible block that uses its seed in its own way."""

    def forward(self, x1: Tensor, x2: Tensor, *context: Tensor, seed: int | None = None) -> Streams:
        assert seed is not None
        return x1 + seed % 5, x2

    def inverse(self, y1: Tensor, y2: Tensor, *context: Tensor, seed: int | None = None) -> Streams:
        assert seed is not None
        return y1 - seed % 5, y2

    def inverse_vjp(self, y: Streams, dy: Streams, *, seed: int | None = None) -> tuple[Streams, Streams, Gradients]:
        return self.inverse(*y, seed=seed), dy, {}


def test_other_reversible_blocks_always_get_a_seed() -> None:
    made = simple_stage([Offset()], [Keep.NOTHING], first_block=1)
    x = (torch.zeros(2), torch.zeros(2))
    for m in range(3):
        assert torch.equal(made.backward(m, made.forward(m, x), x)[0][0], x[0])


def live_bytes() -> int:
    gc.collect()
    without_storage = (FakeTensor, UninitializedTensorMixin)
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and not isinstance(t, without_storage)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_reversible_block_that_keeps_nothing_stores_no_tensor() -> None:
    made = simple_stage([Coupling(branch(4)) for _ in range(3)], [Keep.NOTHING] * 3, first_block=1)
    x = (torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8))
    before = live_bytes()
    for m in range(6):
        made.forward(m, x)
    assert live_bytes() == before
    assert made.stored_bytes() == 0
    assert not any(runner.stored for runner in made.runners)


def test_block_that_is_not_reversible_stores_its_inputs_in_flight() -> None:
    made = simple_stage([nn.Conv2d(4, 4, 3, padding=1)], [Keep.INPUT], first_block=1)
    one = 4 * 4 * 8 * 8 * 4
    before = live_bytes()
    outputs = {}
    for m in range(6):
        outputs[m] = made.forward(m, (torch.randn(4, 4, 8, 8),))
        assert made.stored_bytes() == (m + 1) * one
    delta = tuple(torch.ones_like(t) for t in outputs.pop(0))
    outputs.clear()
    assert live_bytes() - before == 6 * one + delta[0].nbytes
    made.backward(0, (), delta)
    assert made.stored_bytes() == 5 * one


@pytest.mark.parametrize("keep", [Keep.GRAPH, Keep.INPUT])
def test_stashed_and_current_weights_differ_after_an_update(keep: Keep) -> None:
    """A stored graph combines old activations with current weights; stashed and double weights are real copies."""
    x, delta = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    results = {}
    for weights in Weights:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        old = [p.detach().clone() for p in block.parameters()]
        made = simple_stage([block], [keep], weights=weights, first_block=1)
        made.forward(0, (x,))
        with made.updating(), torch.no_grad():
            for p in block.parameters():
                p.mul_(2)
        _, (dx,) = made.backward(0, (), (delta,))
        results[weights] = dx
        w1, b1, w2, _ = old
        hidden = torch.tanh(x @ w1.T + b1)
        if weights is not Weights.CURRENT:
            expected = ((delta @ w2) * (1 - hidden**2)) @ w1
        else:
            if keep is Keep.INPUT:
                hidden = torch.tanh(x @ (2 * w1).T + 2 * b1)
            expected = ((delta @ (2 * w2)) * (1 - hidden**2)) @ (2 * w1)
        torch.testing.assert_close(dx, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(results[Weights.CURRENT], results[Weights.STASHED])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_a_stored_graph_uses_the_updated_weights(optimizer: type[torch.optim.Optimizer], kernel: str) -> None:
    """Old activations and new weights, through convolution and batch normalisation, with each kind of optimizer kernel."""
    torch.manual_seed(1)
    block = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).double()
    block.to(memory_format=torch.channels_last)
    x, delta = torch.randn(2, 3, 5, 5, dtype=torch.float64), torch.randn(2, 2, 5, 5, dtype=torch.float64)
    made = simple_stage([block], [Keep.GRAPH], first_block=1, numerics=Numerics(channels_last=True))
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


def test_double_weights_are_two_versions() -> None:
    """Only one version exists besides the parameters, however many microbatches are in flight."""
    made = simple_stage([nn.Linear(500, 500)], [Keep.INPUT], weights=Weights.DOUBLE, first_block=1, k=2)
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


def test_reconstruction_with_current_weights_differentiates_stashed_ones() -> None:
    """PETRA, Table 4, fourth row."""
    torch.manual_seed(0)
    block = Coupling(nn.Sequential(nn.Linear(3, 3), nn.Tanh())).double()
    old = {name: p.detach().clone() for name, p in block.named_parameters()}
    made = simple_stage([block], [Keep.NOTHING], weights=Weights.STASHED, first_block=1)
    x = tuple(torch.randn(4, 3, dtype=torch.float64) for _ in range(2))
    y = made.forward(0, x)
    with made.updating(), torch.no_grad():
        for p in block.parameters():
            p.mul_(1.5)
    delta = tuple(torch.randn_like(t) for t in y)
    (x1, x2), dx = made.backward(0, y, delta)
    torch.testing.assert_close(x1, y[1] - block.f(y[0]).detach())
    assert torch.equal(x2, y[0])
    slope = 1 - torch.tanh(y[0] @ old["f.0.weight"].T + old["f.0.bias"]) ** 2
    torch.testing.assert_close(dx[1], delta[0] + (delta[1] * slope) @ old["f.0.weight"])


def test_last_stage_stores_the_graph_of_its_last_blocks() -> None:
    method = METHODS["petra"]
    assert method.keep_of([True, False, True, False, False], last=True) == (
        Keep.NOTHING,
        Keep.INPUT,
        Keep.NOTHING,
        Keep.GRAPH,
        Keep.GRAPH,
    )
    assert method.keep_of([True, False], last=False) == (Keep.NOTHING, Keep.INPUT)
    assert METHODS["backprop"].keep_of([True, False], last=False) == (Keep.GRAPH, Keep.GRAPH)


def test_bf16_autocast_keeps_streams_in_float32() -> None:
    model = mixed_net(dtype=torch.float32)
    blocks = [model.build_block(i, 0) for i in range(5)]
    keeps = METHODS["petra"].keep_of([False, True, False, True, True], last=False)
    made = simple_stage(blocks, keeps, numerics=Numerics(torch.bfloat16))
    y = made.forward(0, (RandomSource(dtype=torch.float32).inputs(0),))
    assert {t.dtype for t in y} == {torch.float32}
    x, dx = made.backward(0, y, tuple(torch.ones_like(t) for t in y))
    assert {t.dtype for t in (*x, *dx)} == {torch.float32}
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in made.module.parameters() if p.dim() > 1)


def test_remedies_set_the_weights_of_both_passes() -> None:
    """The forward pass uses predicted weights and the backward pass differentiates corrected ones, until both are reset."""
    block = nn.Linear(3, 2)
    made = simple_stage([block], [Keep.INPUT], first_block=1)
    predicted, corrected = ({p: torch.randn_like(p).requires_grad_() for p in block.parameters()} for _ in range(2))
    made.use_in_forward(predicted)
    made.use_in_backward(corrected)
    x, dy = torch.randn(4, 3), torch.randn(4, 2)
    (y,) = made.forward(0, (x,))
    _, (dx,) = made.backward(0, (), (dy,))
    torch.testing.assert_close(y, nn.functional.linear(x, predicted[block.weight], predicted[block.bias]).detach())
    torch.testing.assert_close(dx, dy @ corrected[block.weight].detach())
    made.use_in_forward({})
    assert torch.equal(made.forward(1, (x,))[0], block(x))
