"""Side tensors: integers that blocks and the loss read. They have no gradient, and travel forward only, in their own types."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import Keep, Model, ModelError, Numerics, Pipeline, Recipe, Runtime, TensorSpec
from petra.cost_model.costs import profile_blocks
from petra.cost_model.memory import stored_activations
from petra.diagnostics.gradient_quality import GradientQuality
from petra.diagnostics.reconstruction_error import ReconstructionMonitor
from petra.plan import make_plan
from petra.reversible import Coupling
from petra.specs import Streams
from tests.support.processes import run_processes

ROWS, TOKENS, WIDTH, VALUES = 4, 6, 8, 400
INPUTS = TensorSpec((ROWS, TOKENS), torch.int64)
CASES: dict[str, dict[str, Any]] = {
    "petra": {"method": "petra"},
    "dsp": {"method": "dsp"},
    "delayed": {"method": "delayed"},
    "1f1b": {"method": "1f1b", "k": 3},
    "reversible": {"method": "reversible"},
    "exact": {"method": "petra", "numerics": Numerics(exact_streams=True)},
    "bf16": {"method": "petra", "numerics": Numerics(message_format="bf16")},
    "int8": {"method": "petra", "numerics": Numerics(message_format="int8")},
}


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VALUES, 2 * WIDTH)

    def forward(self, ids: Tensor) -> Streams:
        x1, x2 = self.table(ids).chunk(2, -1)
        weight = (ids % 7 + 0.125).float()
        return x1.contiguous(), x2.contiguous(), ids.int(), ids % 3 > 0, weight.view(torch.int32)


class Anchored(nn.Module):
    """A function of the stream that depends on the token, exactly for values that bf16 and int8 would round."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Embedding(VALUES, WIDTH)

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.scale(ids)) * mask[..., None]


class Mix(nn.Module):
    """A block that can't be reconstructed, and passes side tensors on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x1: Tensor, x2: Tensor, *side: Tensor) -> Streams:
        return self.linear(x1), x2 * (side[0] % 2)[..., None], *side


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, 5)

    def forward(self, x1: Tensor, x2: Tensor, *side: Tensor) -> Streams:
        return self.linear(torch.cat([x1, x2], -1)), *side


class Weighted:
    """A loss that reads what has travelled."""

    outputs = (4,)

    def __call__(self, logits: Tensor, ids: Tensor, mask: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        assert (ids.dtype, mask.dtype, weight.dtype) == (torch.int32, torch.bool, torch.int32)
        assert torch.equal(weight.view(torch.float32), (ids % 7 + 0.125).float())
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * weight.view(torch.float32).flatten()).mean()


def network(*last: nn.Module) -> Model:
    torch.manual_seed(0)
    couplings = [Coupling(Anchored()) for _ in range(5)]
    return Model.of("anchored", nn.Sequential(Start(), *couplings[:3], Mix(), *couplings[3:], *(last or (End(),))))


def batch(m: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(m)
    return torch.randint(256, VALUES, INPUTS.shape, generator=g), torch.randint(0, 5, INPUTS.shape, generator=g)


SOURCE = SimpleNamespace(inputs=lambda m: batch(m)[0], targets=lambda m: batch(m)[1])


def trained(transport: Any = "auto", lr: float = 0.1, **settings: Any) -> Pipeline:
    recipe = Recipe(lambda module: torch.optim.SGD(module.parameters(), lr=lr), loss=Weighted(), metrics={})
    defaults: dict[str, Any] = {"stages": [2, 2, 2, 2], "runtime": Runtime(transport=transport), **settings}
    pipeline = Pipeline(network(), INPUTS, recipe, **defaults)
    pipeline.train(SOURCE, 9)
    return pipeline


def in_process(rank: int) -> dict[Any, Any]:
    transports = ("lockstep", "edge")
    found = {(name, t): trained(t, **CASES[name]) for name, t in product(CASES, transports)}
    return {key: (p.state_dict(), p.evaluate(SOURCE, 2).loss) for key, p in found.items()}


@pytest.mark.processes
def test_one_process_equals_several_over_every_transport(tmp_path: Path) -> None:
    parts = run_processes(3, in_process, tmp_path, timeout=120)
    expected = {name: trained(**CASES[name]) for name in CASES}
    for name, transport in parts[0]:
        weights, loss = expected[name].state_dict(), expected[name].evaluate(SOURCE, 2).loss
        found = {key: value for part in parts for key, value in part[name, transport][0].items()}
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], weights[key]) for key in weights), (name, transport)
        assert all(part[name, transport][1] == loss for part in parts)


@pytest.mark.parametrize("method", ["petra", "dsp", "1f1b", "reversible"])
def test_gradients_with_fixed_weights_are_those_of_autograd(method: str) -> None:
    pipeline = trained(lr=0.0, method=method, k=10)
    chain = network().build(0)
    for m in range(9):
        streams: Any = (batch(m)[0],)
        for block in chain:
            streams = block(*streams)
        (Weighted()(*streams, batch(m)[1]) / 10).backward()
    own = {f"{name}.{key}": p.grad for name, block in pipeline.blocks() for key, p in block.named_parameters()}
    for key, p in chain.named_parameters():
        assert torch.allclose(own[key], p.grad, rtol=1e-4, atol=1e-7), key


def test_backward_messages_have_no_side_tensors_and_formats_leave_them() -> None:
    for numerics, size in ((Numerics(), 4), (Numerics(message_format="bf16"), 2), (Numerics(message_format="int8"), 1)):
        plan = make_plan(network(), INPUTS, stages=[2, 2, 2, 2], numerics=numerics, processes=4)
        first = plan.boundaries[0]
        positions = ROWS * TOKENS
        assert [str(spec.dtype) for spec in first.forward[0][2:]] == ["torch.int32", "torch.bool", "torch.int32"]
        scales = first.forward_bytes - positions * (2 * WIDTH * size + 4 + 1 + 4)
        assert 0 <= scales <= 64 * (size == 1)
        assert [len(part) for part in first.backward] == [2, 2, 1]
        assert all(spec.dtype.is_floating_point for part in first.backward for spec in part)


def test_stages_store_side_tensors_and_the_memory_model_counts_them() -> None:
    plan = make_plan(network(), INPUTS, stages=[2, 2, 2, 2])
    pipeline = trained(stages=[2, 2, 2, 2])
    forward, x = pipeline.stages[1].forward, pipeline.stages[0].forward(100, (batch(0)[0],))
    forward(100, x)
    side = sum(t.nbytes for t in x[2:])
    assert pipeline.stages[1].stored_bytes() == side
    assert not pipeline.stages[3].stored_bytes()  # nothing is left after a run
    found = stored_activations(plan)[1]
    assert plan.stages[1].in_flight * side <= found <= plan.stages[1].in_flight * 3 * 512


def test_diagnostics_leave_side_tensors_out() -> None:
    pipeline = Pipeline(
        network(), INPUTS, Recipe(lambda m: torch.optim.SGD(m.parameters(), lr=0.0), loss=Weighted(), metrics={}), stages=4
    )
    monitor, rows = ReconstructionMonitor(pipeline), list[dict[str, float]]()
    monitor._every = 1
    with pipeline.hooks.attached(monitor), pipeline.hooks.attached(GradientQuality(pipeline, 2, rows.append)):
        pipeline.train(SOURCE, 4)
    assert 0 < max(monitor.errors.values()) < 1e-5
    assert all(row["reconstruction_error"] < 1e-5 for row in rows)


def test_blocks_are_measured_with_valid_side_tensors() -> None:
    costs = profile_blocks(network(), INPUTS, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), rounds=1)
    assert all(cost.forward > 0 and cost.backward > 0 for cost in costs)
    assert costs[1].boundaries[Keep.NOTHING].backward_bytes == 2 * 2 * ROWS * TOKENS * WIDTH * 4


class Wrong(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order

    def forward(self, x1: Tensor, x2: Tensor, *side: Tensor) -> Streams:
        return (*side, x1) if self.order == "first" else (x1, *side, x2)


@pytest.mark.parametrize("order", ["first", "between"])
def test_streams_come_before_side_tensors(order: str) -> None:
    expected = "block 7: expected floating-point tensors as output, which have gradients, and then any of integers, got"
    with pytest.raises(ModelError, match=expected):
        make_plan(network(Wrong(order)), INPUTS)
