"""Paths besides training: checkpoints, early stop, diagnostics, commands, lost processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from petra.diagnostics.events import Kind
from petra.diagnostics.reconstruction_error import ReconstructionMonitor
from petra.diagnostics.recorder import Recorder
from petra.diagnostics.stage_times import StageTimes
from petra.training import Checkpoints, restore
from tests.emulated import runs
from tests.emulated.core import core
from tests.emulated.device import Options
from tests.emulated.processes import Ended, run, start
from tests.emulated.runs import Case, host

DELAYED = Options(seed=2, delay_rate=0.05)


def resumes(rank: int, case: Case, folder: str, background: bool) -> bool:
    """Save, continue, and compare with a pipeline that resumes from the checkpoint."""
    device = torch.device("cuda", rank)
    pipeline, source = case.pipeline(device), case.source()
    pipeline.train(source, 7)
    saved = Checkpoints(Path(folder), background=background)
    saved.save(pipeline, {}, 1.0)
    pipeline.train(source, 6)
    saved.wait()
    resumed = case.pipeline(device)
    restore(resumed, Path(folder) / f"{7:09}")
    resumed.train(source, 6)
    weights = host(resumed.state_dict())
    return all(torch.equal(value, weights[key]) for key, value in host(pipeline.state_dict()).items())


@pytest.mark.parametrize("background", core([False, True], {1}))
def test_checkpoints_resume(background: bool, tmp_path: Path) -> None:
    numerics = {"autocast": torch.bfloat16} if background else {}
    case = Case(optimizer="adam", numerics=numerics)
    assert run(resumes, case, str(tmp_path), background, world=2, options=DELAYED) == [True, True]


def stops(rank: int, case: Case) -> tuple[int, bool]:
    """Stop early; compare with a run of the length that was reached."""
    device = torch.device("cuda", rank)
    asked = iter([False])
    stopped, planned = case.pipeline(device), case.pipeline(device)
    stopped.train(case.source(), 200, stop=lambda: next(asked, rank == 1))
    planned.train(case.source(), stopped.microbatches_done)
    weights = host(planned.state_dict())
    return stopped.microbatches_done, all(torch.equal(value, weights[key]) for key, value in host(stopped.state_dict()).items())


@pytest.mark.parametrize("transport", core(["lockstep", "edge"], {1}))
def test_all_processes_stop_after_the_same_microbatch(transport: str) -> None:
    first, second = run(stops, Case(transport=transport, arguments={"stages": 2}), world=2, options=DELAYED)
    assert first == second
    assert first[1]
    assert first[0] < 150


def observed(rank: int, case: Case) -> tuple[Any, Any, bool]:
    """Train with all observers of a run and without them."""
    device = torch.device("cuda", rank)
    plain, pipeline = case.pipeline(device), case.pipeline(device)
    times = StageTimes(pipeline)
    pipeline.measures.append(times.metrics)
    monitor = ReconstructionMonitor(pipeline, 0.5)
    with pipeline.hooks.attached(Recorder(pipeline)) as recorder, pipeline.hooks.attached(times), pipeline.hooks.attached(monitor):
        pipeline.train(case.source(), 9)
    plain.train(case.source(), 9)
    weights = host(plain.state_dict())
    equal = all(torch.equal(value, weights[key]) for key, value in host(pipeline.state_dict()).items())
    return recorder.intervals, pipeline.stage_metrics(), equal


def test_observers_read_cuda_events() -> None:
    found = run(observed, Case(), world=2, options=DELAYED)
    for rank, (intervals, metrics, equal) in enumerate(found):
        assert equal
        for stage in range(3 * rank, 3 * rank + 3):
            own = [i for i in intervals if i.stage == stage]
            assert [i.microbatch for i in own if i.kind is Kind.BACKWARD] == list(range(9))
            assert all(i.stop > i.start for i in own if i.kind is Kind.BACKWARD)
            assert metrics[f"stage/{stage + 1}/backward_seconds"] > 0


TINY = (
    *("data=synthetic", "data.images=64", "data.batch_size=8", "model.width=0.0625", "trainer.epochs=1"),
    *("trainer.device=cuda", "trainer.timeout=20"),
)


def command(rank: int, module: str, folder: str, *arguments: str) -> None:
    """Run the ``main`` of a module of launch in this process."""
    import importlib

    os.chdir(folder)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


def launched(module: str, folder: Path, *arguments: str, world: int = 1, **settings: Any) -> Ended:
    ended = start(command, module, str(folder), *arguments, world=world, torchrun=True, timeout=120, **settings)
    assert ended.statuses == [0] * world, ended.outputs
    return ended


def test_a_run_of_one_process_and_its_evaluation(tmp_path: Path) -> None:
    diagnostics = ("trainer.stage_metrics=true", "trainer.trace=4", "trainer.drift=0.5", "trainer.diagnose=4")
    ended = start(command, "launch.train", str(tmp_path), *TINY, *diagnostics, "run_dir=run", torchrun=True, timeout=120)
    assert ended.statuses == [0], ended.outputs
    assert "on cuda, transport local" in ended.outputs[0]
    (row,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert row["stage/1/forward_seconds"] > 0
    launched("launch.evaluate", tmp_path, "run=run", "trainer.device=cuda")


def test_two_processes_tune_trace_and_resume(tmp_path: Path) -> None:
    settings = ("trainer.stages=auto", "method=petra_fresh", "trainer.trace=4", "trainer.stage_metrics=true", "run_dir=run")
    first = launched("launch.train", tmp_path, *TINY, *settings, world=2)
    assert first.outputs[0].count("chosen: stages=[") == 1
    trace = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in trace} == {0, 1}
    launched("launch.train", tmp_path, *TINY, *settings, "trainer.epochs=2", "resume=auto", world=2)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2


def test_the_doctor_finds_the_emulated_devices(tmp_path: Path) -> None:
    text = launched("launch.doctor.command", tmp_path, "trainer.device=cuda", "trainer.timeout=60", world=2).outputs[0]
    assert "| 0 – 1 |" in text
    assert "cuda:1" in text


@pytest.mark.parametrize(("fault", "transport"), core([("die", "lockstep"), ("hang", "edge")], {0}))
def test_a_lost_neighbour_ends_all_within_the_timeout(fault: str, transport: str) -> None:
    options = Options(fault=fault, fault_at=3000, fault_rank=1)
    case = Case(microbatches=200, transport=transport)
    ended = start(runs.train_rank, case, world=3, options=options, timeout=40, group_timeout=3, waits_for_all=fault == "die")
    assert ended.statuses[1] == (-9 if fault == "die" else None)
    assert ended.statuses[0] not in (0, None), ended.outputs
    assert "Watchdog caught collective operation timeout" in ended.outputs[0] + ended.outputs[2]


@pytest.mark.parametrize(("method", "transport"), core([("petra", "lockstep"), ("pipedream", "lockstep")], {0}))
def test_lockstep_does_not_hang_if_the_first_launch_of_a_kernel_waits_for_the_device(method: str, transport: str) -> None:
    options = Options(lazy_loading=True, patience_ms=5000)
    found = run(runs.train_rank, Case(method, transport=transport), world=3, options=options)
    (expected,) = run(runs.train, Case(method), "cpu")
    weights = {key: value for outcome in found for key, value in outcome.weights.items()}
    assert all(torch.equal(value, weights[key]) for key, value in expected.weights.items())
