"""Reconstruction bit for bit with streams on a grid."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from petra import BlockSpec, Keep, Model, ModelError, Pipeline
from petra.engine.stage import Stage
from petra.plan.layout import Layout
from petra.reversible import (
    Coupling,
    Grid,
    ReversibleBlock,
    ReversibleSequence,
    TwoFunctionCoupling,
    frozen_statistics,
    normalisations,
)
from petra.settings import Numerics
from tests.support.nets import RandomStream, Stem, branch, mixed_net

CPU = torch.device("cpu")


def blocks(dtype: torch.dtype, dropout: float = 0.0) -> list[ReversibleBlock]:
    """Couplings for 36 evaluations in all."""
    torch.manual_seed(0)
    made: list[ReversibleBlock] = []
    for _ in range(12):
        made += [Coupling(branch(4, dropout)), TwoFunctionCoupling(branch(4), branch(4, dropout))]
    return [block.to(dtype) for block in made]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.float64, False)])
def test_what_was_added_is_taken_away_bit_for_bit(exact: bool, dtype: torch.dtype, autocast: bool) -> None:
    """By the inverse, and by the inverse fused with the gradients; without the grid neither does."""
    chain, grid = blocks(dtype, dropout=0.2), Grid(dtype)
    x = tuple(torch.randn(2, 4, 6, 6, dtype=dtype) for _ in range(2))
    if exact:
        x = tuple(grid.enter(t) for t in x)
        for block in chain:
            block.carry_on(grid)
    y: tuple[Tensor, Tensor] = (x[0], x[1])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        with torch.no_grad():
            for i, block in enumerate(chain):
                with frozen_statistics(normalisations(block)):
                    y = block(*y, seed=i)
        fused, inverse, dy = y, y, (torch.randn_like(x[0]), torch.randn_like(x[1]))
        for i, block in reversed(list(enumerate(chain))):
            inverse = block.inverse(*inverse, seed=i)
            fused, dy, _ = block.inverse_vjp(fused, dy, seed=i)
    for found in (inverse, fused):
        assert all(torch.equal(a, b) for a, b in zip(found, x, strict=True)) is exact
    grid.require()


def test_gradients_are_those_without_the_grid() -> None:
    """Up to its rounding, 2^-41 in float64; and for the input as if nothing were rounded."""
    x = torch.randn(2, 2, 4, 6, 6, dtype=torch.float64)
    weight = torch.randn(2, 2, 4, 6, 6, dtype=torch.float64)
    found = []
    for grid in (Grid(torch.float64), None):
        sequence = ReversibleSequence(blocks(torch.float64), grid=grid)
        start = x.clone().requires_grad_()
        y1, y2 = sequence(start[0], start[1])
        (y1 * weight[0] + y2 * weight[1]).sum().backward()
        found.append([start.grad, *(p.grad for p in sequence.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("keep", Keep)
def test_a_stage_hands_back_its_input_bit_for_bit(keep: Keep) -> None:
    model = mixed_net(dropout=0.2, dtype=torch.float32)
    made = [model.build_block(i, 4) for i in range(5)]
    kept = [keep if keep is not Keep.NOTHING or isinstance(b, ReversibleBlock) else Keep.INPUT for b in made]
    whole = Stage(copy.deepcopy(made), kept, grid=Grid(), k=1)
    tail = Stage(made[3:], kept[3:], first_block=3, grid=Grid(), k=1)
    head = Stage(made[:3], kept[:3], grid=Grid(), k=1)
    x = RandomStream(dtype=torch.float32).inputs(0)
    between = head.forward(0, (x,))
    y = tail.forward(0, between)
    assert all(torch.equal(a, b) for a, b in zip(y, whole.forward(0, (x,)), strict=True))
    back, _ = tail.backward(0, y, tuple(torch.ones_like(t) for t in y))
    assert all(torch.equal(a, b) for a, b in zip(back, between, strict=True))


def test_training_with_exact_streams_reconstructs_what_others_keep() -> None:
    """Without updates in between, so that weights are unchanged: the same bits from inputs kept and inputs reconstructed."""
    states = []
    for method in ("dsp", "petra"):
        data = RandomStream(dtype=torch.float32)
        pipeline = Pipeline(
            mixed_net(dtype=torch.float32),
            data.spec,
            method=method,
            k=6,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
            numerics=Numerics(exact_streams=True),
        )
        pipeline.train(data, 6)
        states.append(pipeline.state_dict())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_streams_out_of_range_are_an_error() -> None:
    class Loud(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1e4

    grid = Grid()
    sequence = ReversibleSequence([Coupling(Loud())], grid=grid)
    sequence(torch.full((2,), 250.0), torch.zeros(2))
    grid.require()
    sequence(torch.zeros(2), torch.ones(2))
    sequence(torch.tensor([float("nan"), 1.0]), torch.ones(2))  # for an update to find
    with pytest.raises(ModelError, match="exact_streams: found a stream of magnitude 10000, accepted are at most 256"):
        grid.require()


def test_what_has_no_exact_streams_is_refused() -> None:
    class Other(TwoFunctionCoupling):
        carry_on = ReversibleBlock.carry_on

    with pytest.raises(ModelError, match="exact_streams: found a Other"):
        ReversibleSequence([Other(nn.Identity(), nn.Identity())], grid=Grid())
    own = Model("own", (BlockSpec("stem", lambda: Stem(2)), BlockSpec("other", lambda: Other(nn.Identity(), nn.Identity()))))
    layout = Layout.plan(own, RandomStream(dtype=torch.float32).spec, None, processes=2)
    with pytest.raises(
        ModelError, match="exact_streams: expected false with block other, which is reversible and has no carry_on of its own"
    ):
        layout.require_exact()
    with pytest.raises(ModelError, match=r"exact_streams: found streams of torch\.bfloat16"):
        Pipeline(
            mixed_net(dtype=torch.bfloat16),
            RandomStream(dtype=torch.bfloat16).spec,
            optimizer=torch.optim.SGD,
            numerics=Numerics(exact_streams=True),
        )


def test_evaluation_may_leave_the_range() -> None:
    """Nothing is reconstructed there."""
    chain = Stage([Coupling(branch(4))], [Keep.NOTHING], grid=Grid())
    assert chain.grid is not None
    chain.evaluate((torch.full((2, 4, 6, 6), 1e6), torch.ones(2, 4, 6, 6)))
    chain.grid.require()
