"""Data parallelism in several processes, against one pipeline that trains on the joint batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import petra.inplace_abn  # noqa: F401 - adds the norms of revnet18
from petra import BlockSpec, ConfigError, Model, ModelError, Pipeline, UpdateRules
from petra.errors import CommunicationError
from petra.models import revnet18
from petra.plan.layout import make_layout
from petra.specs import IGNORED
from petra.training import Checkpoints
from tests.support.nets import RandomSource, assert_equal, double, make_pipeline, mixed_net, restored, sgd
from tests.support.processes import run_processes
from tests.support.refusals import refuses


def without_norms() -> Model:
    """Return the mixed net without normalisation: samples don't affect each other."""
    return Model("normless", tuple(BlockSpec(b.name, partial(_stripped, b.build)) for b in mixed_net().blocks))


def _stripped(build: Any) -> nn.Module:
    module = build()
    for parent in [*module.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.Identity())
    return module


class Ignoring(RandomSource):
    """The last m mod 4 targets of microbatch m are ignored: shares have different numbers of counted targets, some none."""

    def targets(self, m: int) -> Tensor:
        return super().targets(m).masked_fill(torch.arange(self.batch) >= self.batch - m % 4, IGNORED)


def poisoned() -> RandomSource:
    """The last sample of microbatch 6 is NaN."""
    return RandomSource(6, changes={6: lambda x: torch.cat([x[:-1], x[-1:] * torch.nan])})


def synchronized() -> Model:
    """Return a RevNet in float64 whose statistics are those of all replicas."""
    return double(revnet18(5, 0.0625, norm="inplace_abn_sync", activation="leaky_relu"))


@dataclass
class Case:
    method: str
    k: int
    rules: UpdateRules = UpdateRules()  # noqa: RUF009 (frozen)
    stream: RandomSource = field(default_factory=lambda: RandomSource(batch=6))
    net: Callable[[], Model] = without_norms
    rtol: float = 1e-9


CASES = {
    **{f"{method}, k = {k}": Case(method, k) for method, k in product(("petra", "1f1b"), (1, 3))},
    "clipped": Case("petra", 2, UpdateRules(clip=0.05)),
    "clipped globally": Case("1f1b", 3, UpdateRules(clip=0.05, clip_globally=True)),
    "averages": Case("pipedream", 3, UpdateRules(average=0.9)),
    "ignored targets": Case("petra", 3, stream=Ignoring(batch=6)),
    "skipped": Case("petra", 2, UpdateRules(nonfinite="skip"), poisoned()),
    "loss scale": Case("petra", 2, UpdateRules(loss_scale="dynamic", nonfinite="skip"), poisoned()),
    "synchronized statistics": Case("petra", 2, stream=Ignoring(batch=6), net=synchronized, rtol=1e-7),
}
AGAIN = "petra, k = 3"


def train(case: Case, dp: int) -> dict[str, Any]:
    """Train on a number of microbatches that k does not divide, evaluate, train again; return weights, results and metrics."""
    settings = {"method": case.method, "k": case.k, "rules": case.rules, "dp": dp}
    pipeline = make_pipeline(case.net(), case.stream.spec, optimizer=sgd, learning_rate=lambda t: 0.1, **settings)
    results = [pipeline.train(case.stream, 8), pipeline.evaluate(case.stream, 4), pipeline.train(case.stream, 5)]
    metrics = pipeline.stage_metrics()
    return {"weights": pipeline.state_dict(), "results": results, "metrics": metrics, "transport": pipeline.plan.transport}


def train_all(rank: int) -> dict[str, dict[str, Any]]:
    return {name: train(case, 2) for name, case in CASES.items()} | {"again": train(CASES[AGAIN], 2)}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    return {name: train(case, 1) for name, case in CASES.items()}


@pytest.mark.processes
def test_replicas_train_as_one_pipeline_on_the_joint_batch(alone: dict[str, Any], tmp_path: Path) -> None:
    """Two replicas of two processes each, in float64. One run is repeated."""
    parts = run_processes(4, train_all, tmp_path)
    for name, expected in alone.items():
        rtol = CASES[name].rtol
        replicas = [parts[:2], parts[2:]]
        states = [{key: w for part in replica for key, w in part[name]["weights"].items()} for replica in replicas]
        torch.testing.assert_close(states[0], expected["weights"], rtol=rtol, atol=1e-12)
        assert_equal(states[1], states[0])
        for part in parts:
            for found, wanted in zip(part[name]["results"], expected["results"], strict=True):
                assert (found.targets, found.loss) == pytest.approx((wanted.targets, wanted.loss), rel=rtol, nan_ok=True)
                assert found.metrics == pytest.approx(wanted.metrics, rel=rtol)
            assert part[name]["metrics"] == pytest.approx(expected["metrics"], rel=rtol), name
    for part in parts:
        assert_equal(part["again"]["weights"], part[AGAIN]["weights"])
    assert {run["transport"] for run in parts[0].values()} == {"lockstep", "edge"}
    assert all(alone[name]["metrics"]["stage/6/skipped_updates"] == 1 for name in ("skipped", "loss scale"))


class Half(RandomSource):
    """One of two replicas' share of a data source, as a data source."""

    def __init__(self, whole: RandomSource, replica: int) -> None:
        super().__init__(batch=whole.batch // 2)
        self.inputs = lambda m: whole.inputs(m).chunk(2)[replica]  # type: ignore[method-assign]
        self.targets = lambda m: whole.targets(m).chunk(2)[replica]  # type: ignore[method-assign]


class Doubled(RandomSource):
    """Both halves of a microbatch are equal."""

    def inputs(self, m: int) -> Tensor:
        return super().inputs(m)[: self.batch // 2].repeat(2, 1, 1, 1)

    def targets(self, m: int) -> Tensor:
        return super().targets(m)[: self.batch // 2].repeat(2)


def step(stream: RandomSource, dp: int, *, rate: float, dropout: float = 0.0, microbatches: int = 1) -> dict[str, Tensor]:
    def plain(module: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(module.parameters(), lr=rate)

    pipeline = make_pipeline(mixed_net(dropout=dropout), stream.spec, method="reversible", optimizer=plain, dp=dp)
    pipeline.train(stream, microbatches)
    return pipeline.state_dict()


def in_two_replicas(rank: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 5)).double()
    net[1].register_buffer("strided", torch.randn(4, 2)[:, 0])
    net[1].register_buffer("counts", torch.randint(9, (3,)).to(torch.uint16))
    rules = UpdateRules(average=0.5)
    unseeded = make_pipeline(Model.of("own", net), RandomSource(batch=8).spec, optimizer=sgd, dp=2, rules=rules)
    unseeded.train(RandomSource(batch=8), 2)
    with unseeded.averaged():
        own = {f"average {key}": w.clone() for key, w in unseeded.state_dict().items()}
    found: dict[str, Any] = {
        "unseeded": unseeded.state_dict() | own,
        "statistics": step(RandomSource(batch=8), 2, rate=0.0, microbatches=3),
        "masks": step(Doubled(batch=8), 2, rate=1.0, dropout=0.5),
    }
    stream, store = RandomSource(batch=8), Checkpoints(folder / "two")
    whole, first = accumulating(dp=2), accumulating(dp=2)
    whole.train(stream, 7)
    whole.train(stream, 6)
    first.train(stream, 7)
    store.save(first, {})
    store.wait()
    for name in ("two", "one"):
        found[name] = resumed(folder / name, dp=2)
    found["uninterrupted"] = whole.state_dict()
    pipeline = make_pipeline(without_norms(), RandomSource(batch=8).spec, method="backprop", optimizer=sgd, dp=2)
    with pytest.raises(CommunicationError if rank == 0 else ZeroDivisionError) as lost:
        pipeline.train(RandomSource(8, changes={3: lambda x: 1 // 0} if rank else None), 9)
    found["lost"] = str(lost.value)
    return found


def accumulating(dp: int) -> Pipeline:
    """Return a pipeline with k = 3: seven microbatches are two updates and a third of the next."""
    stream, rules = RandomSource(batch=8), UpdateRules(average=0.9)
    return make_pipeline(without_norms(), stream.spec, k=3, optimizer=sgd, learning_rate=lambda t: 0.1, rules=rules, dp=dp)


def resumed(folder: Path, dp: int) -> dict[str, Tensor]:
    """Return the weights six microbatches after the newest checkpoint."""
    pipeline = restored(accumulating(dp), folder)
    pipeline.train(RandomSource(batch=8), 6)
    return pipeline.state_dict()


Replicated = tuple[dict[str, Any], dict[str, Any], Path]


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Replicated:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("replicas")
    pipeline = accumulating(dp=1)
    pipeline.train(RandomSource(batch=8), 7)
    Checkpoints(folder / "one").save(pipeline, {})
    first, second = run_processes(2, in_two_replicas, folder / "processes", folder)
    return first, second, folder


@pytest.mark.processes
def test_replicas_begin_with_the_weights_of_the_first(replicated: Replicated) -> None:
    """Each process has made its modules without a seed."""
    assert_equal(replicated[0]["unseeded"], replicated[1]["unseeded"])


@pytest.mark.processes
def test_running_statistics_are_the_mean_of_the_replicas(replicated: Replicated) -> None:
    halves = [step(Half(RandomSource(batch=8), replica), 1, rate=0.0, microbatches=3) for replica in (0, 1)]
    moved = [key for key in halves[0] if "running" in key]
    assert moved
    for key, found in ((key, part["statistics"][key]) for part in replicated[:2] for key in moved):
        assert not torch.equal(halves[0][key], halves[1][key])
        torch.testing.assert_close(found, (halves[0][key] + halves[1][key]) / 2, rtol=1e-12, atol=1e-15, msg=key)


@pytest.mark.processes
def test_each_replica_draws_its_own_random_numbers(replicated: Replicated) -> None:
    """The step is the mean of two steps; the first replica draws the same numbers as a single pipeline."""
    half = Half(Doubled(batch=8), 0)
    before, after = step(half, 1, rate=0.0, dropout=0.5), step(half, 1, rate=1.0, dropout=0.5)
    key = "block1.f.0.weight"
    first = after[key] - before[key]
    second = 2 * (replicated[0]["masks"][key] - before[key]) - first
    assert not torch.allclose(second, first, rtol=0.01)
    torch.testing.assert_close(second.norm(), first.norm(), rtol=0.9, atol=0.0)


@pytest.mark.processes
def test_a_run_resumes_exactly_and_with_another_number_of_replicas(replicated: Replicated) -> None:
    """Resume between updates: the first replica takes the gradients that all replicas have accumulated."""
    *parts, folder = replicated
    whole = accumulating(dp=1)
    whole.train(RandomSource(batch=8), 7)
    whole.train(RandomSource(batch=8), 6)
    for part in parts:
        assert_equal(part["two"], part["uninterrupted"])
        torch.testing.assert_close(part["one"], whole.state_dict(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(resumed(folder / "two", dp=1), whole.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.processes
def test_a_lost_replica_is_reported(replicated: Replicated) -> None:
    assert replicated[0]["lost"].startswith("all-reducing the gradients of stage 6 over replicas, microbatch 3: ")


test_invalid_numbers_of_replicas_and_shares_too_small_for_batch_statistics = refuses(
    lambda source, processes, dp: make_layout(mixed_net(), source.spec, None, processes, dp),
    (RandomSource(8), 1, 2, "dp: expected 1 in one process, since replicas need processes of their own, got 2"),
    (RandomSource(8), 4, 3, "dp: expected a divisor of 4, the number of processes, got 3"),
    (RandomSource(8), 4, 0, "dp: expected an integer >= 1, got 0"),
    (RandomSource(6), 4, 4, "dp: expected a divisor of 6, the number of samples of a microbatch, got 4"),
    (RandomSource(2, 2), 2, 2, r"dp: expected shares .*, got float64\[1, 3, 2, 2\] of float64\[2, 3, 2, 2\] \(block"),
    (RandomSource(1, 2), 1, 1, "Expected more than 1 value per channel"),
    kind=(ConfigError, ModelError),
)
