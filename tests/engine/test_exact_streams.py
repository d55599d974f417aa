"""Exact streams: with streams on a grid, reconstruction is exact bit for bit."""

import pytest
import torch
from torch import Tensor, nn

from petra import BlockSpec, Keep, Model, ModelError
from petra.engine.build import make_stage
from petra.engine.options.exact_streams import OnGrid
from petra.plan import make_plan
from petra.reversible import Coupling, Grid, ReversibleBlock, TwoFunctionCoupling, frozen_statistics, normalisations
from petra.settings import Numerics
from tests.support.nets import RandomSource, Stem, assert_equal, branch, make_pipeline, mixed_net, sgd

EXACT = Numerics(exact_streams=True)


def blocks(dtype: torch.dtype, dropout: float = 0.0) -> list[ReversibleBlock]:
    """Return couplings with 36 functions in all."""
    torch.manual_seed(0)
    made: list[ReversibleBlock] = []
    for _ in range(12):
        made += [Coupling(branch(4, dropout)), TwoFunctionCoupling(branch(4), branch(4, dropout))]
    return [block.to(dtype) for block in made]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.float64, False)])
def test_inverse_is_exact_with_a_grid_and_only_then(exact: bool, dtype: torch.dtype, autocast: bool) -> None:
    """Both for the inverse and for the inverse fused with the vector-Jacobian product."""
    chain, grid = blocks(dtype, dropout=0.2), Grid(dtype)
    x = tuple(torch.randn(2, 4, 6, 6, dtype=dtype) for _ in range(2))
    if exact:
        x = tuple(grid.enter(t) for t in x)
        for block in chain:
            block.enable_exact_streams(grid)
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


def test_training_with_reconstructed_inputs_equals_training_with_stored_inputs() -> None:
    """Bit for bit, as long as no update changes the weights between the passes."""
    states, net, data = [], mixed_net(dtype=torch.float32), RandomSource(dtype=torch.float32)
    for method in ("dsp", "petra"):
        pipeline = make_pipeline(net, data.spec, method=method, k=6, optimizer=sgd, numerics=EXACT)
        pipeline.train(data, 6)
        states.append(pipeline.state_dict())
    assert_equal(*states)


def test_streams_out_of_range_are_an_error() -> None:
    class Loud(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1e4

    grid, block = Grid(), Coupling(Loud())
    block.enable_exact_streams(grid)
    block(torch.full((2,), 250.0), torch.zeros(2))
    grid.require()
    block(torch.zeros(2), torch.ones(2))
    block(torch.tensor([float("nan"), 1.0]), torch.ones(2))  # the update reports this one
    with pytest.raises(ModelError, match=r"exact_streams: expected .* at most 256 in torch\.float32, got 10000"):
        grid.require()


def test_blocks_and_types_without_exact_streams_raise_an_error() -> None:
    class Other(TwoFunctionCoupling):
        enable_exact_streams = ReversibleBlock.enable_exact_streams

    with pytest.raises(ModelError, match="exact_streams: expected reversible blocks that override enable_exact_streams, got Other"):
        Other(nn.Identity(), nn.Identity()).enable_exact_streams(Grid())
    own = Model("own", (BlockSpec("stem", lambda: Stem(2)), BlockSpec("other", lambda: Other(nn.Identity(), nn.Identity()))))
    with pytest.raises(ModelError, match=r"exact_streams: .* block other.* enable_exact_streams"):
        make_plan(own, RandomSource(dtype=torch.float32).spec, processes=2, numerics=EXACT)
    half, spec = mixed_net(dtype=torch.bfloat16), RandomSource(dtype=torch.bfloat16).spec
    with pytest.raises(ModelError, match=r"exact_streams: expected .*, got torch\.bfloat16"):
        make_pipeline(half, spec, optimizer=sgd, numerics=EXACT)


def test_evaluation_may_leave_the_range() -> None:
    """Nothing is reconstructed in an evaluation."""
    chain = make_stage([Coupling(branch(4))], [Keep.NOTHING], numerics=EXACT)
    (on_grid,) = chain.runners[0].function.around
    assert isinstance(on_grid, OnGrid)
    chain.evaluate((torch.full((2, 4, 6, 6), 1e6), torch.ones(2, 4, 6, 6)))
    on_grid.grid.require()
