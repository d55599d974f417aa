"""Graphs that blocks store under autocast, where they refer to parameters and not to casts of them."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import ConfigError, Keep, Method, Numerics
from petra.engine.build import make_stage
from petra.method import Weights
from tests.support.nets import RandomSource, assert_equal, make_pipeline, mixed_net

STREAM, WIDE = RandomSource(batch=8, dtype=torch.float32), RandomSource()
BF16 = Numerics(autocast=torch.bfloat16)
BATCH, WIDTH = 64, 8


class Collect(torch.optim.SGD):
    """Keeps the gradients of each step, and changes nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), 0.1)
        self.found: list[list[Tensor]] = []

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.found.append([p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None])


def gradients(method: Method) -> list[list[Tensor]]:
    """Return the gradients of each update of one stage after another."""
    made: list[Collect] = []

    def optimizer(module: nn.Module) -> Collect:
        made.append(Collect(module))
        return made[-1]

    pipeline = make_pipeline(
        mixed_net(dtype=torch.float32), STREAM.spec, method=method, k=2, stages=3, optimizer=optimizer, numerics=BF16
    )
    pipeline.train(STREAM, 8)
    return [step for each in made for step in each.found]


def test_with_weights_that_stay_gradients_are_those_of_backpropagation_under_autocast() -> None:
    stale, exact = gradients(Method("graphs", 2, Keep.GRAPH)), gradients(Method("exact", 0, Keep.GRAPH))
    assert len(stale) == len(exact) > 0
    for a, b in zip(stale, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class Scale(nn.Module):
    """y = w x with a matrix w, under autocast in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(WIDTH) * 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w)


@pytest.mark.parametrize("weights", [Weights.CURRENT, Weights.STASHED])
def test_a_backward_pass_uses_the_weights_after_the_updates_or_those_of_the_forward_pass(weights: Weights) -> None:
    """A weight of 3 I that an update replaces by 5 I: the gradient that arrives at the block before it is 5 or 3 times its own."""
    stage = make_stage(
        [Scale()], [Keep.GRAPH], first_block=1, weights=weights, numerics=BF16, overwritten=weights is Weights.CURRENT
    )
    x, dy = torch.ones(BATCH, WIDTH), torch.ones(BATCH, WIDTH)
    stage.begin_run(1)
    stage.forward(0, (x,))
    with torch.no_grad(), stage.updating():
        next(iter(stage.module.parameters())).copy_(torch.eye(WIDTH) * 5)
    _, (dx,) = stage.backward(0, (), (dy,))
    assert torch.equal(dx, torch.full_like(dx, 5.0 if weights is Weights.CURRENT else 3.0))


class Assigns(torch.optim.SGD):
    """SGD whose steps give parameters other memory, or write to the same."""

    def __init__(self, assigns: bool, module: nn.Module) -> None:
        super().__init__(module.parameters(), 0.1)
        self.assigns = assigns

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if self.assigns:
                p.data = p.data - 0.1 * p.grad
            else:
                p.data.sub_(0.1 * p.grad)


@pytest.mark.parametrize(
    "method",
    [Method("graphs", 2, Keep.GRAPH, Weights.STASHED), Method("inputs", 2, Keep.INPUT), Method("exact", 0, Keep.GRAPH)],
    ids=lambda method: str(method.name),
)
def test_an_optimizer_may_assign_the_memory_of_parameters_where_no_graph_refers_to_it(method: Method) -> None:
    found = []
    for assigns in (True, False):
        pipeline = make_pipeline(mixed_net(), WIDE.spec, method=method, k=1, stages=3, optimizer=partial(Assigns, assigns))
        pipeline.train(WIDE, 6)
        found.append(pipeline.state_dict())
    assert_equal(*found)


def test_an_optimizer_that_assigns_the_memory_that_stored_graphs_refer_to_is_refused() -> None:
    method = Method("graphs", 2, Keep.GRAPH)
    make_pipeline(mixed_net(), WIDE.spec, method=method, k=1, stages=3, optimizer=partial(Assigns, False)).train(WIDE, 6)
    pipeline = make_pipeline(mixed_net(), WIDE.spec, method=method, k=1, stages=3, optimizer=partial(Assigns, True))
    with pytest.raises(ConfigError, match=r"^optimizer: expected one that writes to parameters in place.*, got one that assigns"):
        pipeline.train(WIDE, 6)
