"""Paths besides training: checkpoints, early stop, diagnostics, commands, self-test, lost processes."""

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch import cli
from launch.runtime.rank import Process
from launch.selftest import command as selftest_command
from launch.selftest.plan import plan
from petra.diagnostics.events import Kind
from petra.diagnostics.reconstruction_error import ReconstructionMonitor
from petra.diagnostics.recorder import Recorder, StageTimes
from petra.hooks import Hook
from petra.inplace_abn import InPlaceABN
from petra.specs import Streams
from petra.training import Checkpoints, checkpoint, restore
from tests.emulated import device as emulated
from tests.emulated import runs
from tests.emulated.device import Options
from tests.emulated.processes import core, run, start
from tests.emulated.runs import Case
from tests.structure import ROOT

DELAYED = Options(seed=2, delay_rate=0.05)


def busy_after(state_of: Callable[..., Any], *arguments: Any) -> Any:
    """Return the state of a pipeline, while the GPU is busy: copies of it that nobody waits for come too late."""
    state = state_of(*arguments)
    torch.cuda._sleep(200_000_000)
    return state


def resumes(rank: int, case: Case, folder: str, background: bool) -> bool:
    """Save, continue, and compare with a pipeline that resumes from the checkpoint."""
    device = torch.device("cuda", rank)
    pipeline, source = case.pipeline(device), case.source()
    pipeline.train(source, 7)
    saved = Checkpoints(Path(folder), background=background)
    if background:
        checkpoint.state_of = partial(busy_after, checkpoint.state_of)  # type: ignore[attr-defined]
    saved.save(pipeline, {}, 1.0)
    pipeline.train(source, 6)
    saved.wait()
    resumed = case.pipeline(device)
    restore(resumed, Path(folder) / f"{7:09}")
    resumed.train(source, 6)
    return runs.same(pipeline, resumed)


@pytest.mark.parametrize("background", core([False, True], {1}))
def test_checkpoints_resume(background: bool, tmp_path: Path) -> None:
    numerics = {"autocast": torch.bfloat16} if background else {}
    case = Case(optimizer="adam", numerics=numerics)
    assert run(resumes, case, str(tmp_path), background, world=2, options=DELAYED) == [True, True]


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
    return recorder.intervals, pipeline.stage_metrics(), runs.same(plain, pipeline)


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


def petra(rank: int, folder: str, *arguments: str) -> None:
    """Run a command in a folder, as ``python -m petra`` does."""
    os.chdir(folder)
    cli.main(arguments)


def launched(name: str, folder: Path, *arguments: str, world: int = 1) -> list[str]:
    """Run a command in processes as torchrun does, and return their outputs."""
    ended = start(petra, str(folder), name, *arguments, world=world, torchrun=True, timeout=120)
    ended.require()
    return ended.outputs


def test_a_run_of_one_process_and_its_evaluation(tmp_path: Path) -> None:
    diagnostics = ("trainer.stage_metrics=true", "trainer.trace=4", "trainer.diagnose=4")
    (output,) = launched("train", tmp_path, *TINY, *diagnostics, "run_dir=run")
    assert "on cuda, transport local" in output
    (row,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert row["stage/1/forward_seconds"] > 0
    launched("evaluate", tmp_path, "run", "trainer.device=cuda")


def test_two_processes_tune_trace_and_resume(tmp_path: Path) -> None:
    settings = ("trainer.stages=auto", "method=petra_fresh", "trainer.trace=4", "trainer.stage_metrics=true", "run_dir=run")
    first = launched("train", tmp_path, *TINY, *settings, world=2)
    assert first[0].count("chosen: stages=[") == 1
    trace = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in trace} == {0, 1}
    launched("train", tmp_path, *TINY, *settings, "trainer.epochs=2", "resume=auto", world=2)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(("fault", "transport"), core([("die", "lockstep"), ("hang", "edge")], {0}))
def test_a_lost_neighbour_ends_all_within_the_timeout(fault: str, transport: str) -> None:
    options = Options(fault=fault, fault_at=3000, fault_rank=1)
    case = Case(microbatches=200, transport=transport)
    ended = start(runs.train_rank, case, world=3, options=options, timeout=40, group_timeout=3, waits_for_all=fault == "die")
    assert ended.statuses[1] == (-9 if fault == "die" else None)
    assert ended.statuses[0] not in (0, None), ended.outputs
    assert "Watchdog caught collective operation timeout" in ended.outputs[0] + ended.outputs[2]


@pytest.mark.parametrize("method", core(["petra", "pipedream"], {0}))
def test_lockstep_does_not_hang_if_the_first_launch_of_a_kernel_waits_for_the_device(method: str) -> None:
    options = Options(lazy_loading=True, patience_ms=5000)
    found = run(runs.train_rank, Case(method, transport="lockstep"), world=3, options=options)
    (expected,) = run(runs.train, Case(method), "cpu")
    assert runs.joined(found).difference(expected) == 0


def joint_statistics(rank: int) -> dict[str, int]:
    """Run a layer with statistics of all processes, and return the places where the host waited."""
    device = torch.device("cuda", rank)
    layer = InPlaceABN(4, group=dist.group.WORLD, synchronized=True).to(device)
    x = torch.ones(3, 4, 5, 5, device=device)
    with emulated.watch_syncs() as found:
        for _ in range(2):
            layer(x.clone().requires_grad_() * 1.5).sum().backward()
    return {str(place): count for place, count in found.items()}


def test_joint_statistics_do_not_make_the_host_wait() -> None:
    assert run(joint_statistics, world=2) == [{}, {}]


def bound(rank: int) -> list[int]:
    """Return the current device in the launcher's process group, and after a pipeline for another device was built."""
    found = []
    process = Process.from_environment()
    with process.process_group(process.device("cuda"), 20):
        found.append(torch.cuda.current_device())
        torch.cuda.set_device(0)
        Case().pipeline(torch.device("cuda", rank))
        found.append(torch.cuda.current_device())
    on_second_machine = Process(rank=8 + rank, world=10, local_rank=rank, local_world=2)
    return [*found, on_second_machine.device("cuda").index]


def test_launcher_and_pipeline_make_the_gpu_of_the_local_rank_current() -> None:
    found = start(bound, world=2, torchrun=True).require()
    assert found == [[rank] * 3 for rank in range(2)]


def forked(arguments: Sequence[str], processes: int, seconds: float, folder: Path) -> str | None:
    """Run the self-test in forked processes, and write their output where torchrun would."""
    ended = start(petra, os.getcwd(), "selftest", *arguments, world=processes, torchrun=True, timeout=seconds)
    for rank, output in enumerate(ended.outputs):
        (folder / str(rank)).mkdir()
        (folder / str(rank) / "stderr.log").write_text(output)
    return None if ended.statuses == [0] * processes else str(ended.statuses)


def selftest(devices: int, *arguments: str) -> None:
    """Run the command as on a machine with a number of devices. It exits if a part fails."""
    torch.cuda.device_count = lambda: devices
    selftest_command.start_processes = forked
    selftest_command.main(["--tiny", *arguments])


def test_the_selftest_passes_and_its_report_is_written(tmp_path: Path) -> None:
    """All parts but the comparisons of methods, which test_training.py has."""
    selected = ("processes", "one process", "plain operations", "revnet18", "revgpt, against", "large")
    assert run(selftest, 2, "--full", "--out", str(tmp_path), "--only", *selected, timeout=170) == [None]
    found = json.loads((tmp_path / "selftest.json").read_text())
    assert (found["gpus"], found["tiny"]) == (2, True)
    parts = {part["name"]: part for part in found["parts"]}
    assert {trial.name for trial in plan(2, True, True, False)} - {"machine"} <= {*parts}
    assert all(part["options"]["device"] == "cuda" and part["result"] == "passed" for part in parts.values())
    findings = {kind: {n: p["findings"] for n, p in parts.items() if p["part"] == kind} for kind in ("train", "speed")}
    digests = {name: part["digest"] for name, part in findings["train"].items()}
    assert digests["lockstep, 2 processes"] == digests["two replicas, 2 processes"] == digests["training in one process"]
    assert digests["lockstep, d = 2, large messages"] == digests["edge, d = 2, large messages"]
    assert digests["lockstep, d = 2, large messages"] != digests["lockstep, d = 1, large messages"]
    assert parts["revgpt, against the CPU"]["findings"]["difference"] > 0, "compared with a device of the same kind"
    for part in findings["speed"].values():
        assert part["predicted_over_peak"] == pytest.approx(1, rel=0.1)
    text = (tmp_path / "selftest.md").read_text()
    assert text.count("| passed ") == len(parts)
    assert not (tmp_path / "selftest.tar.gz").exists()


def test_a_hang_under_torchrun_is_reported_by_rank_stage_round_and_microbatch(tmp_path: Path) -> None:
    options = {"devices": 2, "fault": "hang", "fault_at": 5, "fault_microbatch": 7, "fault_rank": 1}
    paths = os.pathsep.join(map(str, (ROOT / "tests/emulated/site", ROOT)))
    variables = {"PYTHONPATH": paths, "PETRA_EMULATED": json.dumps(options), "NCCL_TOKEN": "secret", "NCCL_SHOWN": "1"}
    command = [sys.executable, "-m", "petra", "selftest", "--tiny", "--out", str(tmp_path), "--timeout", "9"]
    command += ["--only", "lockstep", "plain"]
    done = subprocess.run(command, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr
    report = (tmp_path / "selftest.md").read_text()
    assert re.search(r"failed: rank 1, stage \d+, microbatch \d+, \w+, round \d+: [\d.]+ s without progress", report)
    assert re.search(r"rank 0, stage \d+, microbatch \d+.* waits in petra/", report), "in the check of its blocks, or for the GPU"
    assert "Watchdog caught collective operation timeout" in report
    assert re.search(r"plain operations .*\| passed", done.stdout), "the parts after it run in new processes"
    with tarfile.open(tmp_path / "selftest.tar.gz") as file:
        names = {Path(name).name for name in file.getnames()}
        environment = file.extractfile("selftest/environment.txt")
        assert environment is not None
        text = environment.read().decode()
    assert {"stderr.log", "selftest.json", "machine.txt", "packages.txt", "torchrun.log"} <= names
    assert "NCCL_SHOWN=1" in text
    assert "secret" not in text


class Busy(Hook):
    """Keep the GPU busy before each backward pass."""

    def backward_begin(self, stage: int, m: int, y: Streams, dy: Streams) -> None:
        torch.cuda._sleep(10_000_000)


def reserved(rank: int, case: Case) -> int:
    """Train with a slow last rank, and return the largest reserved memory in bytes."""
    pipeline = case.pipeline(torch.device("cuda", rank))
    if rank == dist.get_world_size() - 1:
        pipeline.hooks.append(Busy())
    pipeline.train(case.source(), case.microbatches)
    return torch.cuda.max_memory_reserved(rank)


def test_reserved_memory_does_not_grow_with_the_length_of_a_run_whose_last_rank_is_slow() -> None:
    short, long = (run(reserved, Case(microbatches=count, transport="edge"), world=3) for count in (12, 48))
    assert all(after < 1.5 * before for before, after in zip(short, long, strict=True)), (short, long)
