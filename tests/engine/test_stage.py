"""Stages without a pipeline: gradients, stored activations, versions of weights and hooks, for each kind of block."""

import pytest
import torch
from torch import Tensor, nn

from petra import Keep, Numerics
from petra.engine.build import make_stage
from petra.reversible import Coupling


def test_generators_are_seeded_only_for_blocks_that_may_draw() -> None:
    """A rate of dropout may be 0 at first and rise during a run."""
    torch.manual_seed(0)
    functions = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(rate)) for rate in (0.0, 0.5)]
    made = make_stage([Coupling(f) for f in functions] + [nn.Bilinear(3, 3, 2)], [Keep.NOTHING] * 2 + [Keep.INPUT], first_block=1)
    x = (torch.randn(4, 3), torch.randn(4, 3))

    def backward_repeats_the_masks() -> bool:
        y = made.forward(7, x)
        found, _ = made.backward(7, y, (torch.ones_like(y[0]),))
        return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, x, strict=True))

    assert backward_repeats_the_masks()
    functions[0][1].p = 0.5
    assert backward_repeats_the_masks()
    assert [runner.function.draws for runner in made.runners] == [True, True, False]


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
