"""Settings of launch.train that are chosen automatically, and diagnostics of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.run.autotune import tune_setup
from launch.run.build import Setup
from launch.run.dry_run import stage_memories
from launch.runtime.rank import Process
from petra import PetraError
from petra.cost_model.autotune import Tuned
from tests.launch.test_launch import ALONE, TINY, planned
from tests.support.forked import Forked

pytestmark = pytest.mark.usefixtures("shared_profiles")


def counted(setup: Setup) -> list[int]:
    """Return the bytes of each stage by the account."""
    method = setup.plan.method
    stages = tuple(len(stage.blocks) for stage in setup.plan.stages)
    return [memory.total for memory in stage_memories(setup, {}, method, Tuned(stages, method.delay, (), ()))]


def test_stages_fit_the_memory_limit_by_the_account() -> None:
    settings, two = (*TINY, "trainer.stages=auto"), Process(rank=0, world=2, local_rank=0, local_world=2)
    free = counted(tune_setup(planned(*settings, place=two), ALONE))
    limit = max(free) - 10_000
    tight = tune_setup(planned(*settings, f"trainer.memory_limit={limit / 1e9}", place=two), ALONE)
    assert max(counted(tight)) <= limit < max(free)
    low = 0.3 * max(free) / 1e9
    with pytest.raises(PetraError, match=rf"trainer\.memory_limit: expected at least .* GB for stage \d, got {low:.3g} GB"):
        tune_setup(planned(*settings, f"trainer.memory_limit={low}", place=two), ALONE)


def test_another_partition_than_the_checkpoints_is_tuned_again() -> None:
    settings = (*TINY, "method=petra_fresh")
    before = tune_setup(planned(*settings, "trainer.stages=3"), ALONE)
    chosen = json.loads(json.dumps(before.choices))
    assert tune_setup(planned(*settings, "trainer.stages=3"), ALONE, chosen).plan.method.delay == before.plan.method.delay
    other = tune_setup(planned(*settings, "trainer.stages=5"), ALONE, chosen)
    assert len(other.plan.stages) == 5
    assert isinstance(other.plan.method.delay, tuple)
    assert len(other.plan.method.delay) == 4


@pytest.mark.processes
def test_two_processes_tune_and_trace(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ["trainer.stages=auto", "method=petra_fresh", "trainer.trace=4", "trainer.stage_metrics=true"]
    with Forked(tmp_path, [*TINY, *settings, f"run_dir={folder}"], 2) as run:
        printed, _ = run.finish()
    assert printed.count("chosen: stages=[") == 1
    assert {"trace.json", "timeline.png", "timeline.svg"} <= {p.name for p in folder.iterdir()}
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in trace} == {0, 1}
    assert {f"{op}{m}" for op in "FB" for m in range(4)} <= {event["name"] for event in trace}
    (row,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"stage/1/forward_seconds", "stage/2/waiting_seconds", "stage/2/staleness", "stage/1/weight_drift"} <= row.keys()
