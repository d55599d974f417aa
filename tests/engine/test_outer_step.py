"""Outer steps of replicas that train apart, against a simulation in plain PyTorch that knows nothing of pipelines."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.replicas import join
from petra import BlockSpec, ConfigError, DataError, Method, Model, Pipeline, TensorSpec, UpdateRules, make_plan
from petra.cost_model.memory import predict_memory
from petra.cost_model.stage_memory import LiveBytes
from petra.engine.options.outer_step import OuterStep, OuterUpdate
from petra.engine.options.replicas import OwnShare
from petra.engine.options.sums import CHUNK
from petra.models import revgpt, revnet18
from petra.reversible import Coupling
from petra.staleness import WeightPrediction
from petra.training import Checkpoints
from petra.training.optim import Muon
from tests.support.nets import RandomSource, RandomTokens, assert_equal, double, make_pipeline, mixed_net, restored, sgd, weights
from tests.support.processes import run_processes
from tests.support.refusals import refuses

K, BATCH, MICROBATCHES, FIRST = 2, 12, 19, 11
"""FIRST microbatches end in the middle of an update, while sums travel."""


class Vectors(RandomSource):
    """Random vectors in float64."""

    def __init__(self) -> None:
        super().__init__(BATCH)
        self.spec = TensorSpec((BATCH, 6), torch.float64)


class Stem(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x).chunk(2, 1)


class Head(nn.Linear):
    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([x1, x2], 1))


def coupling() -> nn.Module:
    return Coupling(nn.Sequential(nn.Linear(30, 30), nn.Tanh()))


def small() -> Model:
    """Return four blocks in float64, two of which are reversible and have more numbers than :data:`CHUNK`."""
    builds = {"stem": partial(Stem, 6, 60), "block1": coupling, "block2": coupling, "head": partial(Head, 60, 5)}
    return double(Model("small", tuple(BlockSpec(name, build) for name, build in builds.items())))


@dataclass
class Case:
    outer: OuterStep
    method: str | Method = "backprop"
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    tolerance: float = 1e-12


CASES = {
    "diloco": Case(OuterStep(3)),
    "streaming": Case(OuterStep(4, 0.4, overlap=2, mixing=0.5, staggered=True)),
    "bf16": Case(OuterStep(4, overlap=3, mixing=0.25, format="bf16"), tolerance=1e-6),
    "int8": Case(OuterStep(3, overlap=1, format="int8", staggered=True), tolerance=1e-6),
    "petra": Case(OuterStep(3, overlap=2, mixing=0.5, format="int8", staggered=True), "petra", Muon),
    "graphs": Case(OuterStep(3, overlap=1), "pipedream"),
}
SIMULATED = [name for name, case in CASES.items() if case.method == "backprop"]


def rounded(x: Tensor, form: str | None) -> Tensor:
    """Return a flat tensor as it travels."""
    if form is None:
        return x
    if form == "bf16":
        return x.bfloat16().float()
    parts = [part.float() for part in x.split(CHUNK)]
    scales = [part.abs().max() / 127 for part in parts]
    return torch.cat([(part / scale).round() * scale if scale else part for part, scale in zip(parts, scales, strict=True)])


def simulate(
    case: Case,
    dp: int,
    microbatches: int = MICROBATCHES,
    net: Callable[[], Model] = small,
    data: RandomSource | None = None,
    lost: tuple[int, int] | None = None,
) -> list[dict[str, Tensor]]:
    """Train ``dp`` copies of a model by plain autograd; return the outer weights, and the weights of each copy.

    Args:
        lost: A replica that takes part in no outer step after an update.
    """
    data, step = data or Vectors(), case.outer
    models = [net().build(0) for _ in range(dp)]
    optimizers = [case.optimizer(model) for model in models]
    stages = [[p for p in block.parameters()] for block in models[0].children()]
    outer = [[p.detach().clone() for p in stage] for stage in stages]
    momentum = [[torch.zeros_like(p) for p in stage] for stage in stages]
    sums: dict[int, list[Tensor]] = {}
    for m in range(microbatches):
        x, y = data.inputs(m).chunk(dp), data.targets(m).chunk(dp)
        for r, model in enumerate(models):
            (F.cross_entropy(model(x[r]), y[r]) / K).backward()
        if (m + 1) % K:
            continue
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        update = (m + 1) // K
        for j, stage in enumerate(stages):
            own = [[p.detach() for p in [*model.children()][j].parameters()] for model in models]
            offset = j * step.every // len(stages) if step.staggered else 0
            if update % step.every == offset % step.every:
                flat = [torch.cat([(a - b).flatten() for a, b in zip(outer[j], each, strict=True)]) for each in own]
                if lost is not None and update + step.overlap > lost[1]:
                    del flat[lost[0]]
                if dp > 1:
                    flat = [rounded(each, step.format) for each in flat]
                total = torch.stack(flat).sum(0)
                total = rounded(total, step.format) if dp > 1 else total
                parts = (total.double() / len(flat)).split([p.numel() for p in stage])
                sums[j] = [part.view_as(p) for part, p in zip(parts, stage, strict=True)]
            if j in sums and (update - step.overlap) % step.every == offset % step.every:
                for i, mean in enumerate(sums.pop(j)):
                    momentum[j][i] = step.momentum * momentum[j][i] + mean
                    outer[j][i] = outer[j][i] - step.lr * (mean + step.momentum * momentum[j][i])
                    for each in own:
                        each[i].copy_(step.mixing * each[i] + (1 - step.mixing) * outer[j][i])
    names = [*models[0].state_dict()]
    return [dict(zip(names, [w for stage in outer for w in stage], strict=True)), *(model.state_dict() for model in models)]


def make(case: Case, dp: int, **settings: Any) -> Pipeline:
    data = Vectors()
    settings = {"optimizer": case.optimizer, "method": case.method, "extensions": [case.outer]} | settings
    return make_pipeline(small(), data.spec, k=K, dp=dp, learning_rate=lambda t: 0.05, **settings)


def own_weights(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return the weights that this replica trains."""
    for begin in pipeline.hooks.calls("train_begin"):
        begin(0, 0)
    found = weights(pipeline)
    for end in pipeline.hooks.calls("train_end"):
        end()
    return found


def train(case: Case, dp: int, folder: Path) -> dict[str, Any]:
    """Train without interruption, and from a checkpoint in the middle on in a new pipeline, with the same result."""
    pipeline, data = make(case, dp), Vectors()
    result = pipeline.train(data, FIRST)
    Checkpoints(folder).save(pipeline, {})
    again = restored(make(case, dp), folder)
    assert_equal(weights(again), weights(pipeline))
    again.train(data, MICROBATCHES - FIRST)
    evaluated = pipeline.evaluate(data, 3)
    pipeline.train(data, MICROBATCHES - FIRST)
    found = {"outer": weights(pipeline), "own": own_weights(pipeline)}
    assert_equal([weights(again), own_weights(again)], [*found.values()])
    return found | {"results": [result.loss, evaluated.loss]}


def train_all(rank: int, runs: dict[int, Path], names: list[str]) -> dict[tuple[int, str], dict[str, Any]]:
    """Train cases with several numbers of replicas; few with more than two."""
    pairs = [(dp, name) for dp in runs for name in (names if dp < 4 else ("streaming", "int8"))]
    return {(dp, name): train(CASES[name], dp, runs[dp] / name) for dp, name in pairs}


Trained = dict[tuple[int, int], list[dict[tuple[int, str], dict[str, Any]]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return what each process found, by the number of replicas and of processes in each."""
    folder = tmp_path_factory.mktemp("outer")
    torch.set_num_threads(1)
    alone = train_all(0, {1: folder / "1"}, SIMULATED)
    two = run_processes(2, train_all, folder / "two", {2: folder / "2"}, [*CASES])
    four = run_processes(4, train_all, folder / "four", {2: folder / "22", 4: folder / "4"}, [*CASES])
    return {(1, 1): [alone], (2, 1): two, (2, 2): four, (4, 1): four}


def joined(parts: list[dict[tuple[int, str], dict[str, Any]]], key: tuple[int, str], kind: str) -> dict[str, Tensor]:
    """Return the weights of the processes of a replica."""
    return {name: w for part in parts for name, w in part[key][kind].items()}


@pytest.mark.processes
@pytest.mark.parametrize("name", SIMULATED)
def test_replicas_equal_a_plain_simulation(trained: Trained, name: str) -> None:
    """In float64. Replicas have the same outer weights bit for bit, and weights of their own."""
    case = CASES[name]
    for (dp, n), parts in trained.items():
        if (dp, name) not in parts[0]:
            continue
        outer, *own = simulate(case, dp)
        first, key = joined(parts[:n], (dp, name), "outer"), (dp, name)
        torch.testing.assert_close(first, outer, rtol=case.tolerance, atol=case.tolerance)
        for r in range(dp):
            assert_equal(joined(parts[r * n : (r + 1) * n], key, "outer"), first)
            found = joined(parts[r * n : (r + 1) * n], key, "own")
            torch.testing.assert_close(found, own[r], rtol=case.tolerance, atol=case.tolerance)


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_one_process_equals_two_within_a_replica(trained: Trained, name: str) -> None:
    alone, divided, key = trained[2, 1], trained[2, 2], (2, name)
    for r in range(2):
        for kind in ("outer", "own"):
            assert_equal(joined(divided[2 * r : 2 * r + 2], key, kind), alone[r][key][kind])
        assert divided[2 * r][key]["results"] == alone[r][key]["results"]


@pytest.mark.processes
def test_replicas_in_threads_equal_processes(trained: Trained) -> None:
    """The replicas of benchmarks.replicas."""
    layout = make_plan(small(), Vectors().spec, k=K, processes=2, dp=2).layout
    for name in ("streaming", "int8", "petra"):
        case = CASES[name]
        settings = {"optimizer": case.optimizer, "method": case.method, "extensions": [case.outer]}
        spec = TensorSpec((BATCH // 2, 6), torch.float64)
        pipelines = [make_pipeline(small(), spec, k=K, learning_rate=lambda t: 0.05, **settings) for _ in range(2)]
        join(pipelines)
        for count in (FIRST, MICROBATCHES - FIRST):
            with ThreadPoolExecutor(2) as threads:
                shares = [OwnShare(Vectors(), layout, r, range(2)) for r in range(2)]
                list(threads.map(Pipeline.train, pipelines, shares, [count] * 2))
        for r, pipeline in enumerate(pipelines):
            found = trained[2, 1][r][2, name]
            assert_equal([weights(pipeline), own_weights(pipeline)], [found["outer"], found["own"]])


def resumed(rank: int, saved: dict[int, Path]) -> dict[str, Tensor]:
    """Return the weights of two replicas, resumed from one, before and after the step that its checkpoint still lacks.

    After "joint", the weights of replicas that go on from there without outer steps.
    """
    pipeline = restored(make(Case(OuterStep(4, overlap=2)), 2), saved[1])
    found = {"before": weights(pipeline)}
    pipeline.train(Vectors(), 4)
    found["after"] = weights(pipeline)
    Checkpoints(saved[1].parent / "2").save(pipeline, {})
    joint = restored(make(CASES["diloco"], 2, extensions=[]), saved[1].parent / "2")
    joint.train(Vectors(), 4)
    found["joint"] = weights(joint)
    return {f"{key} {when}": w for when, each in found.items() for key, w in each.items()}


@pytest.mark.processes
def test_a_sum_that_has_not_acted_yet_is_a_mean_for_any_number_of_replicas(tmp_path: Path) -> None:
    alone = make(Case(OuterStep(4, overlap=2)), 1)
    alone.train(Vectors(), 9)  # four updates
    Checkpoints(tmp_path / "1").save(alone, {})
    before = weights(alone)
    alone.train(Vectors(), 4)
    one, two = run_processes(2, resumed, tmp_path / "two", {1: tmp_path / "1"})
    for key in weights(alone):
        assert torch.equal(one[f"{key} joint"], two[f"{key} joint"]), "replicas that sum gradients have one state"
    for found in (one, two):
        for key, w in weights(alone).items():
            torch.testing.assert_close(found[f"{key} before"], before[key], rtol=0, atol=0)
            torch.testing.assert_close(found[f"{key} after"], w, rtol=1e-12, atol=1e-12)


def test_blocks_of_stages_with_and_without_a_sum_keep_their_own_weights_in_one_stage(tmp_path: Path) -> None:
    """The sum of the first stage is dropped: what has been learned is in the next one."""
    case = Case(OuterStep(8, lr=1.0, momentum=0.0, overlap=4, staggered=True))
    divided = make(case, 1, stages=2)
    divided.train(Vectors(), 34)  # 17 updates
    Checkpoints(tmp_path).save(divided, {})
    assert [worker.update[OuterUpdate].pending for worker in divided.workers.values()] == [True, False]
    joint = restored(make(case, 1, stages=1), tmp_path)
    joint.train(Vectors(), 8)  # the first stage's sum would act after update 20
    outer, own = weights(joint), own_weights(joint)
    assert all(not torch.equal(own[key], outer[key]) for key in own)


def test_a_sum_of_earlier_versions_is_refused() -> None:
    (part,) = (each for each in make(CASES["diloco"], 1).workers[0].update.parts if isinstance(each, OuterUpdate))
    (p, *_) = part.tensors()["method/outer_own"]
    with pytest.raises(
        DataError, match=r"^checkpoint: expected method/outer_mean \(commit 449f214c reads older ones\), got method/o"
    ):
        part.resume({"method/outer_sum": {p: p}})


def sums_and_prediction(rank: int) -> tuple[int, int]:
    """Return the most bytes that live in training with sums in int8, and those that are predicted."""
    texts = RandomTokens(2, 8, 64)
    settings = {"extensions": [OuterStep(4, overlap=2, format="int8")], "optimizer": sgd, "method": "backprop", "k": 2}
    with LiveBytes() as live:
        pipeline = make_pipeline(revgpt(64, 64, 2, 4, size=8), texts.spec, stages=1, dp=2, **settings)
        live.most = live.now
        pipeline.train(texts, 24)
    return live.most, predict_memory(pipeline.plan, pipeline.recipe, TensorSpec((8,), torch.int64), device_type="cpu")[0].tensors


@pytest.mark.processes
def test_memory_of_sums_is_predicted(tmp_path: Path) -> None:
    for most, found in run_processes(2, sums_and_prediction, tmp_path):
        assert 0.98 * most <= found <= 1.05 * most  # a buffer may outlive its sum for a moment


def predicted(pipeline: Pipeline) -> list[Tensor]:
    versions = [runner.versions.predicted for stage in pipeline.stages.values() for runner in stage.runners]
    return [w for version in versions if version is not None for w in version.values()]


def test_predicted_weights_follow_an_outer_step() -> None:
    """Also in a resumed run, whose weights are the outer ones while predictions are restored."""
    data, case = Vectors(), Case(OuterStep(2), "petra")
    extensions = [WeightPrediction("difference"), case.outer]
    pipeline = make(case, 1, extensions=extensions)
    changes = {}
    for stage in pipeline.stages.values():
        changes |= dict.fromkeys(stage.gradients.parameters)
    pipeline.train(data, 16)  # eight updates; the last of each stage is one with an outer step
    for begin in pipeline.hooks.calls("train_begin"):
        begin(16, 16)
    for worker in pipeline.workers.values():
        remedy = next((part for part in worker.update.parts if hasattr(part, "refresh")), None)
        for runner in worker.stage.runners:
            for name, p in runner.parameters.items():
                if remedy is not None and runner.versions.predicted is not None:
                    change = remedy.by_parameter(remedy.values)[p]
                    staleness = pipeline.plan.stages[worker.index].staleness
                    torch.testing.assert_close(runner.versions.predicted[name], p + staleness * change)
    assert predicted(pipeline)


def test_edited_and_loaded_weights_start_again() -> None:
    pipeline, data = make(CASES["streaming"], 1), Vectors()
    pipeline.train(data, 10)
    state = {key: w + 1 for key, w in weights(pipeline).items()}
    pipeline.load_state_dict(state)
    assert_equal(own_weights(pipeline), state)
    pipeline.train(data, 2)
    with torch.no_grad():
        for p in pipeline.stages[0].module.parameters():
            p.mul_(0)
    pipeline.train(data, 1)  # no update
    assert all(not w.any() for key, w in own_weights(pipeline).items() if key.startswith("stem"))


def test_replicas_with_different_batch_statistics_are_refused(tmp_path: Path) -> None:
    run_processes(2, _refuse_synchronized, tmp_path)


def _refuse_synchronized(rank: int) -> None:
    model: Model = double(revnet18(5, 0.0625, norm="inplace_abn_sync", activation="leaky_relu"))
    with pytest.raises(ConfigError, match=r"outer.every: expected 0 with layers that share batch statistics"):
        make_pipeline(model, RandomSource(4).spec, dp=2, extensions=[OuterStep(2)], optimizer=sgd)


test_settings_that_do_not_fit_are_refused = refuses(
    lambda change: make_pipeline(mixed_net(), RandomSource().spec, **{"extensions": [OuterStep(2)], "optimizer": sgd, **change}),
    ({"rules": UpdateRules(shard=True)}, "optim.shard: expected false with outer.every=2, got true"),
    ({"rules": UpdateRules(average=0.9)}, "optim.average: expected null with outer.every=2, got 0.9"),
)
test_values_out_of_range_are_refused = refuses(
    lambda values: OuterStep(**values),
    ({"every": 2, "overlap": 2}, "outer.overlap: expected an integer < outer.every=2, got 2"),
    ({"every": -1}, "outer.every: expected an integer >= 0, got -1"),
    ({"every": 2, "momentum": 1.0}, "outer.momentum: expected a number >= 0 and < 1, got 1.0"),
    ({"every": 2, "format": "int4"}, "outer.format: expected null, bf16 or int8, got int4"),
)
