"""launch.selftest: which parts run, what counts as a failure, and the report."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from launch.runtime.rank import Process
from launch.selftest import command
from launch.selftest.command import LARGEST_DIFFERENCE, Trial, judge, plan, run_part
from launch.selftest.parts import PARTS
from petra import METHODS

ALONE = Process(rank=0, world=1, local_rank=0, local_world=1)
CPU = torch.device("cpu")
TINY = {"model": "revnet18", "width": 0.125, "size": 8, "batch": 2, "method": "petra", "k": 1, "microbatches": 2}


def test_all_methods_and_both_transports_are_tested_in_any_machine() -> None:
    for gpus, tiny in ((0, True), (4, False)):
        runs = [*plan(gpus, tiny)]
        assert {run.options["method"] for run in runs if run.part == "compare"} == {*METHODS}
        assert {run.options["transport"] for run in runs if run.part == "transport"} == {"lockstep", "edge"}
        assert {run.options["device"] for run in runs} == {"cuda" if gpus else "cpu"}
    speeds = [run for run in plan(4, False) if run.part == "speed"]
    assert len({run.name for run in speeds}) == len(speeds) == 2 * 3 * 2 * 4  # compiled or not, models, batches, methods
    assert not [run for run in plan(1, False) if run.part == "transport"]  # NCCL refuses two processes on one GPU


def test_parts_on_the_cpu() -> None:
    """A run equals itself, its memory is predicted, and its digest depends on its length only."""
    assert PARTS["compare"](TINY, CPU, ALONE) == {"difference": 0.0, "repeatable": True}
    speed = PARTS["speed"](TINY, CPU, ALONE)
    assert min(speed["samples_per_second"], speed["peak_bytes"], speed["predicted_bytes"]) > 0
    first, second = (PARTS["transport"]({**TINY, "microbatches": count}, CPU, ALONE) for count in (4, 5))
    assert first["repeatable"]
    assert first["digest"] != second["digest"]


@pytest.mark.parametrize("minutes", ["nan", "0", "-1"])
def test_a_time_limit_without_time_is_refused(
    minutes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise every part would be left out, and the test would pass."""
    done = subprocess.CompletedProcess([], 0, stdout="", stderr="")
    monkeypatch.setattr(command, "start_processes", lambda *_: done)
    with suppress(SystemExit):
        command.main([f"--minutes={minutes}", "--out", str(tmp_path)])
    assert f"--minutes: expected a number > 0, got {float(minutes)}" in capsys.readouterr().err


def test_differences_from_the_cpu_fail() -> None:
    assert judge({"difference": LARGEST_DIFFERENCE / 2, "repeatable": True}, {}) == "passed"
    assert "differ from the CPU" in judge({"difference": float("nan"), "repeatable": True}, {})
    assert "two runs" in judge({"difference": 0.0, "repeatable": False}, {})
    assert judge({"message_bytes": 10**6}, {"least_bytes": 2 * 10**6}) == "failed: messages have 1.0 MB, fewer than 2"


@pytest.mark.processes
def test_a_part_that_fails_is_reported_with_its_reason() -> None:
    found = run_part(Trial("compare", "wrong", {**TINY, "device": "tpu"}), seconds=100)
    assert found["result"].startswith("failed: error: trainer.device: expected ")
    assert "got tpu" in found["result"]


def test_parts_without_time_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_doctor", lambda processes: "")
    command.main(["--out", str(tmp_path), "--minutes", "1e-9"])
    text = (tmp_path / "selftest.md").read_text()
    assert "0 of " in text
    assert "| petra against the CPU      " in text
    assert text.count("| left out: no time |") == len([*plan(0, tiny=True)])
