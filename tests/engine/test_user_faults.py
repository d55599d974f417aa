"""Losses, blocks and calls that a pipeline can't follow: results equal plain PyTorch's, or an error says what does not fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import Model, ModelError, Pipeline
from petra.reversible import Coupling
from tests.engine.test_any_block import FLAT, Halves, Vectors, linear
from tests.support.nets import hook, make_pipeline, sgd


def reversible(*functions: nn.Module, **settings: Any) -> Pipeline:
    """Return a pipeline of couplings of 3 channels per stream, with a block per stage."""
    blocks = {"stem": Halves(), **{f"c{i}": Coupling(f) for i, f in enumerate(functions)}, "merge": Halves(), "head": linear(6, 3)}
    return make_pipeline(Model.of("mine", blocks), FLAT, **({"optimizer": sgd, "method": "reversible"} | settings))


# The loss


def test_a_loss_of_other_tensors_than_the_output_is_refused() -> None:
    """A penalty on the weights, a parameter of its own, and a penalty that comes later in the same run."""
    held: list[Tensor] = []
    own, calls = nn.Parameter(torch.ones(3).double()), []

    def later(y: Tensor, t: Tensor) -> Tensor:
        calls.append(1)
        return F.cross_entropy(y, t) + (0 if len(calls) < 10 else held[0].square().sum())

    losses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda y, t: F.cross_entropy(y, t) + sum(p.square().sum() for p in held),
        lambda y, t: F.cross_entropy(y * own, t),
        later,
    ]
    for loss in losses:
        pipeline = reversible(linear(3, 3), loss=loss)
        held[:] = [p for _, block in pipeline.blocks() for p in block.parameters()]
        with pytest.raises(ModelError, match=r"^loss: expected a function of outputs and targets \(optim.weight_decay .*gradient"):
            pipeline.train(Vectors(), 40)


# Random numbers


class Late(nn.Module):
    """Draws a mask in some microbatches only: not in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return F.dropout(y, 0.5) if not x.is_meta and x[0, 0] > 0 else y


def reconstruction_error(pipeline: Pipeline, data: Any, microbatches: int, during: Callable[[], None] = lambda: None) -> float:
    """Return the largest difference of a block's input in a forward and a backward pass."""
    inputs, errors = {}, [0.0]
    pipeline.hooks.append(
        hook(
            block_forward_begin=lambda j, b, m, x: inputs.update({(b, m): [t.clone() for t in x]}),
            block_backward_end=lambda j, b, m, x, g: errors.extend(
                (a - t).abs().max().item() for a, t in zip(x, inputs[b, m], strict=True)
            ),
        )
    )
    pipeline.train(data, microbatches, on_microbatch=lambda report: during())
    return max(errors)


def test_masks_are_the_same_in_both_passes_whenever_a_block_begins_to_draw() -> None:
    data = Vectors()
    data.inputs = lambda m: Vectors.inputs(data, m) * (0 if m < 3 else 1)  # type: ignore[method-assign]
    late = reversible(Late(), Late(), k=2, learning_rate=lambda t: 0.0)
    assert reconstruction_error(late, data, 12) < 1e-12
    rising, done = nn.Dropout(0.0), []
    pipeline = reversible(nn.Sequential(linear(3, 3), rising), Late(), k=2, learning_rate=lambda t: 0.0)
    modules = [m for _, block in pipeline.blocks() for m in block.modules() if isinstance(m, nn.Dropout)]

    def raise_rate() -> None:
        done.append(1)
        for m in modules if len(done) > 3 else ():
            m.p = 0.5

    assert reconstruction_error(pipeline, Vectors(), 12, raise_rate) < 1e-12


class LateStem(nn.Module):
    """A block that stores its input, and draws in some microbatches only."""

    def __init__(self) -> None:
        super().__init__()
        self.late = Late()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        return self.late(a), b


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws_also_late_ones() -> None:
    """Blocks that store inputs or graphs: other random numbers of the process do not matter."""
    for method in ("dsp", "backprop", "1f1b"):
        found = []
        for seed in (1, 2):
            torch.manual_seed(0)
            model = Model.of("mine", {"stem": LateStem(), "merge": Halves(), "head": linear(6, 3)})
            pipeline = make_pipeline(model, FLAT, optimizer=sgd, method=method, k=2)
            torch.manual_seed(seed)
            pipeline.train(Vectors(), 12)
            found.append(pipeline.state_dict())
        torch.testing.assert_close(*found, rtol=0, atol=0)
