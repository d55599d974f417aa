"""Loss of a replica while the pipeline trains, against one pipeline that leaves out the same samples."""

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petra import Extension, OuterStep, Pipeline
from petra.elastic.liveness import Liveness
from petra.elastic.membership import Generation, Membership, MembershipChanged
from petra.elastic.replicas import DealtShares, ElasticReplicas, ElasticTrainer
from petra.engine.options.replicas import Share
from petra.engine.recipe import Recipe
from petra.errors import CommunicationError
from petra.plan import make_plan
from petra.plan.layout import make_layout
from petra.specs import IGNORED
from petra.training import Checkpoints
from petra.training.checkpoint import best_of, checkpoints
from tests.engine.test_outer_step import Case, simulate
from tests.engine.test_replicas import without_norms
from tests.support.nets import RandomSource, assert_equal, make_pipeline, sgd
from tests.support.processes import run_processes

BATCH, MICROBATCHES, LAST, LOST = 6, 9, 5, 1
"""Replica ``LOST`` can't read the inputs of microbatch ``LAST``."""


class Lost(Exception):
    """The end of a process."""


def lost(x: Tensor) -> None:
    raise Lost


class WithoutLost(RandomSource):
    """Targets of the lost replica are ignored from microbatch ``first`` on."""

    def __init__(self, dp: int, first: int) -> None:
        super().__init__(batch=BATCH)
        self.dp, self.first = dp, first

    def targets(self, m: int) -> Tensor:
        parts = [*super().targets(m).chunk(self.dp)]
        if m >= self.first:
            parts[LOST] = torch.full_like(parts[LOST], IGNORED)
        return torch.cat(parts)


def joined(rank: int, dp: int, processes: int, port: int) -> Membership:
    """Return the membership of a process, once all have joined."""
    replica, process = divmod(rank, processes)
    membership = Membership(replica, dp, Liveness("127.0.0.1", port, "run", f"replica {replica}", process, processes, 20))
    membership.join()
    return membership


def leave_group() -> None:
    """Close the connections, as the end of a process does."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def in_replicas(
    rank: int, dp: int, world: int, method: str, k: int, port: int, extensions: Sequence[Extension] = ()
) -> dict[str, Any]:
    """Train until the pipeline has drained without the lost replica, and conclude the generation."""
    membership = joined(rank, dp, world // dp, port)
    plan = make_plan(without_norms(), RandomSource(batch=BATCH).spec, method=method, k=k, processes=world, dp=dp, metrics=0)
    recipe = Recipe(sgd, lambda t: 0.1, metrics={}, extensions=extensions)
    pipeline = Pipeline.from_plan(plan, recipe, replicas=ElasticReplicas(plan.layout, torch.device("cpu"), membership))
    data = RandomSource(BATCH, changes={LAST: lost} if membership.replica == LOST else None)
    try:
        result = pipeline.train(data, MICROBATCHES)
    except (Lost, CommunicationError) as error:
        membership.leave()
        leave_group()
        return {"error": type(error)}
    assert isinstance(pipeline.replicas, ElasticReplicas)
    found = {"weights": pipeline.state_dict(), "start": pipeline.replicas.start, "targets": result.targets, "loss": result.loss}
    with pytest.raises(MembershipChanged):
        membership.conclude("trained")
    found["following"] = membership.store.get("generation").decode()
    dist.barrier(pipeline.replicas.pipeline_group)
    leave_group()
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("world", "dp", "method", "k"), [(3, 3, "backprop", 2), (4, 2, "petra", 2)])
def test_the_others_train_on_the_joint_batch_of_those_that_remain(world: int, dp: int, method: str, k: int, tmp_path: Path) -> None:
    """In float64. Without delays, the update that was interrupted leaves out the same samples in all stages."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = run_processes(world, in_replicas, tmp_path, dp, world, method, k, store.port)
    processes = world // dp
    left = [part for rank, part in enumerate(parts) if rank // processes != LOST]
    assert all("error" in part for rank, part in enumerate(parts) if rank // processes == LOST)
    replicas = [left[start : start + processes] for start in range(0, len(left), processes)]
    states = [{key: w for part in replica for key, w in part["weights"].items()} for replica in replicas]
    for state in states[1:]:
        assert_equal(state, states[0])
    assert all(part["start"] == 0 for part in left)
    assert left[0]["targets"] == MICROBATCHES * BATCH * (dp - 1) // dp
    assert all(part["loss"] == left[0]["loss"] for part in left)
    assert all(f'[{LOST}, "replica {LOST}"]' not in part["following"] for part in left)
    if method == "backprop":
        first = LAST // k * k
        spec = RandomSource(batch=BATCH).spec
        alone = make_pipeline(without_norms(), spec, method=method, k=k, optimizer=sgd, learning_rate=lambda t: 0.1, metrics={})
        alone.train(WithoutLost(dp, first), MICROBATCHES)
        torch.testing.assert_close(states[0], alone.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.processes
@pytest.mark.parametrize("outer", [OuterStep(2, overlap=1, mixing=0.5), OuterStep(2, overlap=1, format="bf16", staggered=True)])
def test_a_lost_replica_misses_an_outer_step(outer: OuterStep, tmp_path: Path) -> None:
    """It is lost while the second sum travels: the step is the mean over the replicas that remain."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = run_processes(3, in_replicas, tmp_path, 3, 3, "backprop", 2, store.port, (outer,))
    assert "error" in parts[LOST]
    assert_equal(parts[0]["weights"], parts[2]["weights"])
    case = Case(outer, optimizer=partial(sgd, lr=0.1))
    expected = simulate(case, 3, MICROBATCHES, without_norms, RandomSource(batch=BATCH), (LOST, LAST // 2))[0]
    tolerance = 1e-12 if outer.format is None else 1e-6
    torch.testing.assert_close(parts[0]["weights"], expected, rtol=tolerance, atol=tolerance)


def test_an_outer_step_is_the_mean_over_the_members_of_a_generation() -> None:
    """One of two is left. With η = 1 and μ = 0, an outer step takes its weights, which are those of training alone."""
    found = []
    for outer in ([OuterStep(4, lr=1.0, momentum=0.0)], []):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        plan = make_plan(without_norms(), RandomSource(batch=BATCH).spec, method="backprop", k=1, dp=2, processes=2)
        membership: Any = SimpleNamespace(generation=Generation(2, ((0, "a"),)), replica=0, replicas=2, process=0, store=None)
        recipe = Recipe(sgd, lambda t: 0.1, metrics={}, extensions=outer)
        pipeline = Pipeline.from_plan(plan, recipe, replicas=ElasticReplicas(plan.layout, torch.device("cpu"), membership))
        pipeline.train(RandomSource(BATCH), 4)
        found.append(pipeline.state_dict())
        dist.destroy_process_group()
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_shares_of_an_evaluation_are_dealt_to_the_replicas_that_remain() -> None:
    """Each share is evaluated once. Replicas with fewer shares repeat one, all rows of which are padding."""
    source, dp, microbatches = RandomSource(batch=6), 3, 3
    layout = make_layout(without_norms(), source.spec, None, 3, dp)
    found = []
    for position in range(2):
        share = DealtShares(source, layout, position, 2, microbatches)
        for m in range(5):
            targets = share.targets(m)
            assert len(share.inputs(m)) == len(targets) == 2
            if share.real_rows(m):
                found.append(torch.cat([share.inputs(m).flatten(), targets.double()]))
    shares = [zip(source.inputs(m).chunk(dp), source.targets(m).chunk(dp), strict=True) for m in range(microbatches)]
    expected = [torch.cat([x.flatten(), t.double()]) for pairs in shares for x, t in pairs]
    assert sorted(share.tolist() for share in found) == sorted(share.tolist() for share in expected)


def test_weights_of_shares_sum_to_one_over_the_replicas_that_take_part() -> None:
    source = WithoutLost(3, 0)
    source.targets = lambda m: RandomSource.targets(source, m).masked_fill(torch.arange(BATCH) == 0, IGNORED)  # type: ignore[method-assign]
    layout = make_layout(without_norms(), source.spec, None, 3, 3)
    for replica, expected in ((0, 1 / 3), (2, 2 / 3)):
        share = Share(source, layout, replica, (2, 0))
        share.targets(0)
        assert share.parts(0).fraction == pytest.approx(expected)


REPLICAS, PROCESSES = 2, 2


@pytest.fixture
def members() -> Iterator[list[list[Membership]]]:
    """Yield the memberships of each process of each replica, in the same generation."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, ranks = store.port, range(REPLICAS * PROCESSES)
    with ThreadPoolExecutor(len(ranks)) as threads:
        found = list(threads.map(lambda rank: joined(rank, REPLICAS, PROCESSES, port), ranks))
    yield [found[:PROCESSES], found[PROCESSES:]]
    del store  # until here, it has served them


def test_a_process_of_a_lost_replica_does_not_exclude_the_other_replica(members: list[list[Membership]]) -> None:
    """The first process of replica 1 has died, and the second asks first."""
    assert members[0][0].remaining("group of process 0", [0, 1]) == [0]
    with pytest.raises(CommunicationError, match="replica 2: excluded"):
        members[1][1].remaining("group of process 1", [0, 1])
    assert members[0][1].remaining("group of process 1", [0, 1]) == [0]


def test_all_processes_of_two_replicas_agree_on_the_one_that_remains(members: list[list[Membership]]) -> None:
    """Also if no replica has been declared lost when they ask, as after the loss of a link."""
    members[1][0].liveness.declare_lost = lambda incarnation: None  # type: ignore[method-assign]
    assert members[1][0].remaining("group of process 0", [0, 1]) == [1]
    with pytest.raises(CommunicationError, match="replica 1: excluded"):
        members[0][1].remaining("group of process 1", [0, 1])
    assert members[1][1].remaining("group of process 1", [0, 1]) == [1]


class Epochs(RandomSource):
    batches_per_epoch, batches = 4, 1
    unit, bytes_per_target = "images", None


def test_the_last_checkpoint_is_written_again_if_a_loss_interrupted_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replicas that remain have no epoch left, after which they would save. Nothing is written twice."""
    monkeypatch.setattr(ElasticTrainer, "phase", lambda *_, **__: nullcontext())
    pipeline = make_pipeline(without_norms(), Epochs(batch=BATCH).spec, optimizer=sgd, learning_rate=lambda t: 0.1)

    def trainer() -> ElasticTrainer:
        return ElasticTrainer(pipeline, Epochs(batch=BATCH), Epochs(batch=BATCH), checkpoints=Checkpoints(tmp_path, every=2))  # type: ignore[arg-type]

    first, following = trainer(), trainer()
    first.fit(1)
    (last, *_), best = checkpoints(tmp_path), best_of(tmp_path)
    shutil.rmtree(last)
    following.resume(first.state())
    following.fit(1)
    assert (checkpoints(tmp_path)[0], best_of(tmp_path)) == (last, best)
    written = last.stat().st_ino
    following.fit(1)
    assert last.stat().st_ino == written
