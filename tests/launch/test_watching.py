"""Settings of launch.train that are chosen automatically, and diagnostics of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.run.autotune import tune_setup
from launch.run.build import Setup
from launch.run.dry_run import stage_memories
from launch.run.resume import Start, restore_choices
from launch.runtime.rank import Process
from petra import ConfigError, Keep, PetraError
from petra.cost_model.autotune import Tuned
from tests.launch.test_launch import ALONE, TINY, planned
from tests.support.forked import Forked

pytestmark = pytest.mark.usefixtures("shared_profiles")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.trace=0", r"trainer\.trace: expected null or an integer >= 1, got 0"),
        ("trainer.diagnose=0", r"trainer\.diagnose: expected null or an integer >= 1, got 0"),
        ("trainer.concurrency=0", r"trainer\.concurrency: expected an integer from 1 to 1000, got 0"),
        (
            "trainer.memory_limit=2",
            r"trainer\.memory_limit: expected null, or a number > 0 with .*, got 2\.0",
        ),
        ("method.keep=[graph,input]", r"method\.keep: expected one value, or 10, one per block, got 2 values"),
        ("method.keep=[all]", r"method\.keep: expected .*, got \[.all.\]"),
    ],
)
def test_invalid_values(override: str, message: str) -> None:
    rate = planned().learning_rate(microbatches_per_epoch=1)
    with pytest.raises(ConfigError, match=message):
        planned(override).pipeline(rate)


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"method\.delay: expected an integer >= 0 with method\.fill=true, got auto"):
        planned("method.delay=auto", "method.fill=true", "method.flush=true")
    with pytest.raises(ConfigError, match=r"trainer\.concurrency: expected 1, except for one process on the CPU, got 2"):
        planned("trainer.concurrency=2", place=Process(rank=0, world=2, local_rank=0, local_world=2))
    with pytest.raises(ConfigError, match=r"trainer\.diagnose: expected null, or one process, got 5 in 2 processes"):
        planned("trainer.diagnose=5", place=Process(rank=0, world=2, local_rank=0, local_world=2))
    with pytest.raises(
        PetraError, match=r"trainer\.memory_limit: expected at least .* GB for stage 1 \(or more stages\), got 1e-06 GB"
    ):
        tune_setup(planned(*TINY, "method.keep=auto", "trainer.memory_limit=1e-6", "trainer.stages=2"), ALONE)


def counted(setup: Setup) -> list[int]:
    """Return the bytes of each stage by the account."""
    method = setup.plan.method
    stages = tuple(len(stage.blocks) for stage in setup.plan.stages)
    return [memory.total for memory in stage_memories(setup, {}, method, Tuned(stages, method.delay, method.keep, (), ()))]


def test_stages_fit_the_memory_limit_by_the_account() -> None:
    """The estimate of the search is far below the account, so a first search finds that graphs fit."""
    settings = (*TINY, "method.keep=auto", "trainer.stages=3")
    free = counted(tune_setup(planned(*settings), ALONE))
    limit = max(free) - 10_000
    tight = tune_setup(planned(*settings, f"trainer.memory_limit={limit / 1e9}"), ALONE)
    assert max(counted(tight)) <= limit
    assert set(tight.plan.method.keep) != {"graph"}
    low = 0.75 * max(free) / 1e9
    with pytest.raises(PetraError, match=rf"trainer\.memory_limit: expected at least .* GB for stage \d, got {low:.3g} GB"):
        tune_setup(planned(*settings, f"trainer.memory_limit={low}"), ALONE)


def test_plan_with_automatic_settings(capsys: pytest.CaptureFixture[str]) -> None:
    setup = tune_setup(planned(*TINY, "method.delay=auto", "method.keep=auto", "trainer.stages=3"), ALONE)
    keeps = list(setup.plan.method.keep)
    assert keeps.count("graph") > len(keeps) / 2, "memory has no limit, but times are measured beside other tests"
    assert isinstance(setup.plan.method.delay, tuple)
    assert all(0 <= d <= 2 for d in setup.plan.method.delay)
    assert capsys.readouterr().out.startswith("chosen: stages=[")
    assert tune_setup(setup, ALONE) is setup


def test_another_partition_than_the_checkpoints_is_tuned_again() -> None:
    settings = (*TINY, "method=petra_fresh")
    before = tune_setup(planned(*settings, "trainer.stages=3"), ALONE)
    chosen = {
        "stages": [len(s.blocks) for s in before.plan.stages],
        "delay": list(before.plan.method.delay),
        "keep": before.plan.method.keep,
    }
    start = Start(None, {"chosen": chosen})
    assert restore_choices(planned(*settings, "trainer.stages=3"), start).plan.method.delay == before.plan.method.delay
    other = tune_setup(restore_choices(planned(*settings, "trainer.stages=5"), start), ALONE)
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


@pytest.mark.processes
def test_gradient_quality_of_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Forked(tmp_path, [*TINY, "trainer.diagnose=4", f"run_dir={folder}"], 1) as run:
        run.finish()
    rows = [json.loads(line) for line in (folder / "gradients.jsonl").read_text().splitlines()]
    assert {(row["microbatch"], row["stage"]) for row in rows} == {(m, j) for m in (0, 4) for j in range(1, 11)}
    assert (folder / "gradients.png").exists()


@pytest.mark.parametrize("override", ["trainer.precision=bf16", "remedy=prediction", "remedy=pipemare"])
def test_automatic_settings_with_precision_and_remedy(override: str) -> None:
    setup = tune_setup(planned(*TINY, "method.keep=auto", "trainer.stages=2", override), ALONE)
    assert setup.pipeline(setup.learning_rate(1)).plan.method.keep is Keep.NOTHING
