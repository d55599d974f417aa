"""``petra bench gpu``: contestants make the same update; the command chooses sizes, survives failures and measures in processes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.pipelines import plain_update, require_plain_update
from benchmarks.two_stages import sgd
from launch.bench import command
from launch.bench.command import Failed, Workers
from launch.bench.contestants import Batches, Setting
from launch.bench.measure import CONTESTANTS, PEERS, Measurement
from petra import Numerics, TensorSpec, make_plan
from petra.models import MODELS
from tests.support.commands import refused
from tests.support.processes import run_processes


def compare_with_plain_updates(rank: int) -> None:
    """Compare each contestant's first update with plain autograd's, on images and on tokens."""
    nets = (
        (MODELS["revnet18"](10, width=0.125), TensorSpec((2, 3, 8, 8), torch.float32)),
        (MODELS["revgpt"](16, dim=8, depth=3, heads=2, size=4), TensorSpec((2, 4), torch.int64)),
    )
    for model, inputs in nets:
        count = len(model.blocks)
        plan = make_plan(model, inputs, k=4, stages=(3, count - 3), processes=2, numerics=Numerics(channels_last=True))
        setting, batches = Setting(plan, rank, sgd), Batches(inputs, 4)
        before, after = plain_update(setting, batches)
        for name, peer in PEERS.items():
            run = peer(setting, batches)
            require_plain_update(name, run, before, after)
            expected = {"torch DDP": (count, count), "one device": (count, 0)}.get(name, (3, count - 3))
            assert len(run.blocks) == expected[rank]


@pytest.mark.processes
def test_contestants_make_plain_updates(tmp_path: Path) -> None:
    run_processes(2, compare_with_plain_updates, tmp_path, timeout=100)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Trials that a run of the command asks for. Two samples are too many for 1F1B, and torch's compressed replicas fail."""
    trials: list[Measurement] = []

    def measure(workers: Workers, trial: Measurement) -> dict[str, Any]:
        trials.append(trial)
        if trial.contestant == "torch DDP, bf16 messages" or (trial.contestant == "torch 1F1B" and trial.batch == 2):
            raise Failed("rank 1: out of memory")
        details = {"idle": [0.1, 0.5], "gbps": 2.0, "reserved": [10**9, 3 * 10**9]} if trial.details else {}
        details |= {"predicted": [10**9, 2 * 10**9]} if trial.details and trial.contestant.startswith("PETRA") else {}
        speed = 200.0 if trial.contestant == "PETRA" else 100.0
        return {"samples_per_second": speed * trial.batch + len(trials) / 1000, "round_us": 50.0, **details}

    monkeypatch.setattr(Workers, "measure", measure)
    return trials


def test_contestants_alternate_at_their_best_sizes_and_failures_are_named(
    asked: list[Measurement], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main(["gpu", "--out", str(tmp_path), "--only", "RevNet-50, eager"])
    rounds = [t for t in asked if t.updates == 2]
    working = [name for name in CONTESTANTS if name != "torch DDP, bf16 messages"]
    assert [t.contestant for t in rounds] == 2 * working
    assert {t.contestant: t.batch for t in rounds} == {name: 1 if name == "torch 1F1B" else 2 for name in working}
    assert [t.contestant for t in asked if t.host] == working
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["cases"]["RevNet-50, eager"]["PETRA"]["sizes"].keys() == {"1", "2"}
    printed, page = capsys.readouterr().out, (tmp_path / "bench.html").read_text(encoding="utf-8")
    for text in (printed, page):
        assert "rank 1: out of memory (RevNet-50, eager: torch DDP, bf16 messages)" in text
        assert "say nothing about GPUs" in text
    (row,) = (line for line in printed.splitlines() if "| PETRA  " in line)
    cells = [cell.strip() for cell in row.split("|")[3:-1]]
    assert cells == ["2", "400", "400", "400", "2.00", "4.00", "50", "50", "2", "3", "1.50"]
    assert page.count("<svg") == 1


def test_what_has_no_time_is_named_and_bad_arguments_are_refused(asked: list[Measurement], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        command.main(["gpu", "--out", str(tmp_path), "--minutes", "1e-9", "--only", "eager: PETRA"])
    cases = json.loads((tmp_path / "bench.json").read_text())["cases"]
    assert {entry["error"] for case in cases.values() for entry in case.values()} == {"left out: no time"}
    assert not asked
    for arguments, expected in ((["--devices", "0"], "--devices"), (["--minutes", "0"], "--minutes"), (["--only", "x"], "--only")):
        assert refused(command.main, ["gpu", "--out", str(tmp_path), *arguments]).startswith(f"{expected}: ")


def test_the_search_leaves_time_for_rounds(asked: list[Measurement], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement takes 10 of 180 seconds: ten in the search, nine in rounds. By default, the files are in a folder of runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: 10.0 * len(asked)))
    command.main(["gpu", "--minutes", "3", "--only", "RevNet-50, eager"])
    (case,) = json.loads((tmp_path / "runs/bench/bench.json").read_text())["cases"].values()
    assert [len(entry["rounds"]) for entry in case.values()] == [2, 2, 2, 2, 1, 0, 0]
    assert [entry["error"] for entry in case.values()] == [None] * 5 + ["left out: no time"] * 2


@pytest.mark.processes
def test_processes_measure_again_after_a_failure() -> None:
    workers, trial = Workers(1), Measurement("GPT", "PETRA", 2, 1, tiny=True, details=True)
    try:
        with pytest.raises(Failed, match=r"^rank 0: .*unknown"):
            workers.measure(Measurement("GPT", "unknown", 1, 1, tiny=True))
        found = workers.measure(trial)
    finally:
        workers.stop()
    assert found["samples_per_second"] > 0
    assert 0 <= found["idle"][0] < 1
