"""Split backward passes: the order of the work changes, the results do not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from petra import METHODS, ConfigError, Keep, Method, Model, Pipeline, UpdateRules, Weights
from petra.engine.stage import Stage
from petra.hooks import Hook
from petra.method import STORABLE, Split
from petra.settings import Numerics, Runtime
from petra.staleness import Remedy
from tests.support.nets import RandomSource, mixed_net
from tests.support.processes import run_processes

K, MICROBATCHES = 5, (9, 7)


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)


@pytest.mark.parametrize("keep", STORABLE)
@pytest.mark.parametrize("weights", list(Weights))
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_split_stage_computes_the_same_bits(keep: Keep, weights: Weights, autocast: torch.dtype | None) -> None:
    """Five microbatches in flight, an update after the third, and second parts that are two microbatches late."""
    model = mixed_net(dropout=0.2, dtype=torch.float32)
    if keep is Keep.GRAPH and weights is Weights.CURRENT and autocast:
        pytest.skip("not a valid method")
    found = []
    for split in (False, True):
        blocks = [model.build_block(b, 4) for b in range(1, 5)]
        keeps = [Keep.INPUT if keep is Keep.NOTHING and b == 1 else keep for b in range(4)]
        stage = Stage(blocks, keeps, weights=weights, k=6, seed=4, first_block=1, autocast=autocast, stale=True, split=split)
        optimizer = sgd(stage.module)
        torch.manual_seed(0)
        outputs = [stage.forward(m, (torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8))) for m in range(5)]
        sent: list[Tensor] = []
        for m, y in enumerate(outputs):
            x, delta = stage.backward(m, y, tuple(torch.randn_like(t) for t in y))
            sent += [*x, *delta]
            if split and m == 2:
                for earlier in range(3):
                    stage.backward_weights(earlier)
            if m == 2:
                with stage.updating():
                    optimizer.step()
        for m in (3, 4) if split else ():
            stage.backward_weights(m)
        found.append([*sent, *(p.grad for p in stage.module.parameters()), *stage.module.state_dict().values()])
    assert len(found[0]) > 50
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.evaluations = nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._evaluate, x, use_reentrant=False)

    def _evaluate(self, x: Tensor) -> Tensor:
        self.evaluations += 1
        return torch.tanh(self.linear(x))


def test_a_block_with_activation_checkpointing_is_not_evaluated_again_by_the_second_part() -> None:
    evaluations = []
    for split in (False, True):
        block = Checkpointed()
        stage = Stage([block], [Keep.INPUT], first_block=1, split=split)
        for m in range(5):
            (y,) = stage.forward(m, (torch.randn(2, 3),))
            stage.backward(m, (y,), (torch.randn_like(y),))
            if split:
                stage.backward_weights(m)
            if m == 0:
                block.evaluations = 0  # the first microbatch finds out
        evaluations.append(block.evaluations)
    assert evaluations[0] == evaluations[1] == 12


class Order(Hook):
    """Records what a stage does."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, int]] = []

    def forward_end(self, stage: int, m: int, y: object) -> None:
        self.events.append((stage, "F", m))

    def backward_end(self, stage: int, m: int, x: object, dx: object) -> None:
        self.events.append((stage, "B", m))

    def send_end(self, stage: int, peer: int, m: int, message: object) -> None:
        if peer == stage - 1:
            self.events.append((stage, "send", m))

    def backward_weights_end(self, stage: int, m: int) -> None:
        self.events.append((stage, "W", m))

    def update_end(self, stage: int, m: int) -> None:
        self.events.append((stage, "update", m))

    def of(self, stage: int, *kinds: str) -> str:
        return " ".join(f"{kind}{m}" for j, kind, m in self.events if j == stage and kind in kinds)


def test_zb_h1_runs_the_steps_of_the_paper() -> None:
    """Four stages and eight microbatches, Fig. 2 of Qi et al. 2024: stage j postpones W by j microbatches."""
    data = RandomSource()
    pipeline = Pipeline(mixed_net(), data.spec, method="zb_h1", k=8, stages=4, optimizer=sgd)
    with pipeline.hooks.attached(Order()) as order:
        pipeline.train(data, 8)
    kinds = ("F", "B", "W", "update")
    assert order.of(0, *kinds) == (
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7 update7"  # the first stage sends nothing: B is whole
    )
    assert order.of(1, *kinds) == "F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7 update7"
    assert order.of(3, *kinds) == "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7 update7"
    assert [stage.in_flight for stage in pipeline.plan.stages] == [4, 4, 4, 4]


@pytest.mark.parametrize("keep", STORABLE)
def test_zb_h1_trains_the_weights_of_1f1b(keep: Keep) -> None:
    """Also where a run ends within an update."""
    found = []
    for name in ("1f1b", "zb_h1"):
        method, data = replace(METHODS[name], keep=keep), RandomSource()
        pipeline = Pipeline(mixed_net(), data.spec, method=method, k=K, optimizer=sgd, learning_rate=lambda t: 0.02)
        found.append(([pipeline.train(data, count) for count in MICROBATCHES], pipeline.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][key]) for key, value in found[0][1].items())


@pytest.mark.parametrize("changes", [{"flush": False}, {"fill": True}])
def test_zero_bubble_needs_a_flush_and_no_fill(changes: dict[str, bool]) -> None:
    with pytest.raises(ConfigError, match=r"method\.split: expected none or input_first with .*, got zero_bubble"):
        replace(METHODS["zb_h1"], **changes)


CASES: dict[str, dict[str, object]] = {
    **{name: {"method": method} for name, method in METHODS.items()},
    "d = 1": {"method": Method("x", 1, Keep.NOTHING)},
    "graphs": {"method": Method("x", 2, Keep.GRAPH)},
    "2BW without activations": {"method": Method("x", 1, Keep.NOTHING, Weights.DOUBLE)},
    "PipeMare": {"method": METHODS["petra"], "remedy": Remedy(discount=8, correction=0.135)},
    "global clipping": {"method": METHODS["1f1b"], "rules": UpdateRules(clip=0.1, clip_globally=True)},
    "exact streams, bf16": {
        "method": METHODS["petra"], "numerics": Numerics(autocast=torch.bfloat16, exact_streams=True)
    },
}  # fmt: skip


def trained(
    name: str, split: Split | None, transport: str = "auto", dp: int = 1, stages: int | None = None
) -> tuple[dict[str, Tensor], list[object], str]:
    """Two runs that end within an update. Returns weights, results, and the order of this process's last stage."""
    settings = {"k": K, "learning_rate": lambda t: 0.02, **CASES[name]}
    method = settings.pop("method")
    assert isinstance(method, Method)
    if split is not None:
        method = replace(method, split=split)
    model, data = mixed_net(dropout=0.1, dtype=torch.float32), RandomSource(dtype=torch.float32)
    made = Pipeline(
        model, data.spec, method=method, optimizer=sgd, runtime=Runtime(transport=transport), dp=dp, stages=stages, **settings
    )  # type: ignore[arg-type]
    with made.hooks.attached(Order()) as order:
        results: list[object] = [made.train(data, count) for count in MICROBATCHES]
    last = max(made.stages, default=0)
    return {k: v.clone() for k, v in made.state_dict().items()}, results, order.of(last, "B", "send", "W")


def run_all(rank: int) -> dict[tuple[str, str], tuple[dict[str, Tensor], list[object], str]]:
    torch.set_num_threads(1)
    return {
        (name, transport): trained(name, Split.ZERO_BUBBLE if name == "zb_h1" else Split.INPUT_FIRST, transport)
        for name, transport in product(CASES, ("lockstep", "edge"))
    }


@pytest.mark.processes
def test_weights_of_split_backward_passes_are_those_of_whole_ones(tmp_path: Path) -> None:
    """All methods, in three processes over both transports, against one process that does not split."""
    torch.set_num_threads(1)
    parts = run_processes(3, run_all, tmp_path)
    for name in CASES:
        expected, results, _ = trained(name, Split.NONE)
        for transport in ("lockstep", "edge"):
            found = {key: value for part in parts for key, value in part[name, transport][0].items()}
            differing = [key for key, value in expected.items() if not torch.equal(found[key], value)]
            assert not differing, (name, transport)
            assert all(part[name, transport][1] == results for part in parts), (name, transport)


def orders(rank: int) -> tuple[str, str]:
    return trained("petra", Split.INPUT_FIRST, "edge", stages=3)[2], trained("petra", Split.INPUT_FIRST, "lockstep", stages=3)[2]


@pytest.mark.processes
def test_the_message_leaves_before_the_second_part(tmp_path: Path) -> None:
    first, *others = run_processes(3, orders, tmp_path)
    assert all("W" not in order for order in first)
    for found in others:
        assert all(order.startswith("B0 send0 W0 B1 send1 W1 B2 send2 W2") for order in found)


def replicated(rank: int) -> list[tuple[dict[str, Tensor], list[object], str]]:
    torch.set_num_threads(1)
    return [trained(name, split, dp=2) for name in ("petra", "1f1b") for split in (Split.NONE, Split.INPUT_FIRST)] + [
        trained("zb_h1", None, dp=2)
    ]


@pytest.mark.processes
def test_replicas_train_the_same_weights(tmp_path: Path) -> None:
    for whole, split, flush, split_flush, zb_h1 in run_processes(4, replicated, tmp_path):
        for a, b in ((whole, split), (flush, split_flush), (flush, zb_h1)):
            assert a[1] == b[1]
            assert all(torch.equal(value, b[0][key]) for key, value in a[0].items())


def test_a_model_of_one_stage_has_nothing_to_split() -> None:
    model: Model = mixed_net()
    pipeline = Pipeline(model, RandomSource().spec, method="zb_h1", k=2, stages=1, optimizer=sgd)
    assert not pipeline.plan.stages[0].split


class Recorded(torch.optim.SGD):
    """Changes nothing and remembers the gradients of its first step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), lr=0.0)
        self.gradients: list[Tensor] = []

    def step(self) -> None:  # type: ignore[override]
        self.gradients = [p.grad.clone() for p in self.param_groups[0]["params"]]


class Contiguous(torch.autograd.Function):
    """Makes a tensor and its gradient contiguous, which torch's pipeline requires of messages."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.contiguous()

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy.contiguous()


class Part(nn.Sequential):
    """Blocks of one stage of torch's pipeline, which passes several streams on."""

    def forward(self, *x: Tensor) -> Tensor | tuple[Tensor, ...]:
        x = tuple(Contiguous.apply(t) for t in x)  # type: ignore[no-untyped-call]
        for block in self:
            x = block(*x)
            x = x if isinstance(x, tuple) else (x,)
        x = tuple(t.clone(memory_format=torch.contiguous_format) for t in x)  # torch detaches outputs in place
        return x if len(x) > 1 else x[0]


PARTS = ((0, 1), (2, 3), (4, 5))
"""Blocks of each of three stages."""


def both_gradients(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of a stage by ``zb_h1`` and by torch's zero-bubble schedule."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

    data, k = RandomSource(), 6
    own = Pipeline(mixed_net(), data.spec, method="zb_h1", k=k, stages=[2, 2, 2], optimizer=Recorded, seed=3)
    own.train(data, k)
    (worker,) = own.workers.values()
    assert isinstance(worker.update.optimizer, Recorded)
    model = mixed_net()
    part = Part(*(model.build_block(b, 3) for b in PARTS[rank]))
    stage = PipelineStage(part, rank, 3, torch.device("cpu"))
    schedule = ScheduleInterleavedZeroBubble([stage], k, loss_fn=nn.functional.cross_entropy)
    if rank == 0:
        schedule.step(torch.cat([data.inputs(m) for m in range(k)]))
    else:
        schedule.step(target=torch.cat([data.targets(m) for m in range(k)]), return_outputs=False)
    return worker.update.optimizer.gradients, [p.grad for p in part.parameters() if p.grad is not None]


@pytest.mark.processes
def test_zb_h1_has_the_gradients_of_torchs_zero_bubble_schedule(tmp_path: Path) -> None:
    for own, theirs in run_processes(3, both_gradients, tmp_path):
        assert len(own) == len(theirs) > 0
        for a, b in zip(own, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
