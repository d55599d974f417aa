"""Test that the contestants of the benchmarks compute the same, and run benchmark commands with tiny sizes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import pipelines, plan_check, refetch, reversible_sequence, scaling, simulator_check
from benchmarks.reversible_peers import LIBRARIES, PEERS, gradients
from petra.cost_model.costs import StageCost
from tests.support.processes import run_processes


@pytest.mark.parametrize("name", PEERS)
def test_reversible_peers_have_the_gradients_of_plain_autograd(name: str) -> None:
    if name in LIBRARIES:
        pytest.importorskip(name.lower())
    branches, x = reversible_sequence.build(4, channels=4, size=4, batch=2, dtype=torch.float64)
    found, expected = (gradients(n, branches, x) for n in (name, "plain autograd"))
    assert expected.norm() > 0
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def run(main: object, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[str, object]:
    """Run a benchmark, and return the figures that it saves."""
    monkeypatch.setattr(sys, "argv", ["benchmark", "--out", str(folder / "figures.json"), "--rounds", "1", *arguments])
    main()  # type: ignore[operator]
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.processes
def test_pipelines_make_plain_updates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command, which itself compares each contestant's first update with plain autograd's."""
    sizes = ["--k=1,3", "--blocks=2", "--channels=4", "--size=4", "--batch=2", "--microbatches=1", "--threads=1"]
    found = run(pipelines.main, monkeypatch, tmp_path, *sizes)
    missing = found["not_installed"]
    assert set(found["periods"]) == {"1", "3"}
    for row in found["periods"].values():
        assert set(row) | set(missing) == set(pipelines.CONTESTANTS)
        assert min(seconds for times in row.values() for seconds in times) > 0
    printed = capsys.readouterr().out
    assert all(f"{name}: not installed" in printed for name in missing)
    assert "| 18 | 3 | " in printed


@pytest.mark.processes
def test_refetching_stores_nothing_in_the_first_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = run(refetch.main, monkeypatch, tmp_path, "--width=0.0625", "--batch=2", "--jpegs=1", "--microbatches=2")
    images = [4 * 3 * 2 * 32 * 32, 4 * 3 * 224 * 224, 4 * 3 * 224 * 224]
    assert [setting["stored_bytes"] for setting in found["settings"]] == [{"stored": 2 * n, "refetched": 0} for n in images]
    assert all(min(s) > 0 for setting in found["settings"] for s in setting["seconds"].values())


@pytest.mark.parametrize("stages", [2, 10, 18])
@pytest.mark.parametrize("k", [1, 3, 32])
def test_simulated_periods_equal_the_closed_form(stages: int, k: int) -> None:
    """Compare with 4 and 3 forwards without a flush, and 3 (k + J - 1) / k forwards with a flush."""
    costs = {"nothing": asdict(StageCost(1, 3, weights=1)), "graph": asdict(StageCost(1, 2, weights=1))}
    found = pipelines.simulated(costs, {"bandwidth": float("inf"), "latency": 0.0}, stages, k)
    flushed = 3 * (k + stages - 1) / k
    zero_bubble = 3 + (stages - 1) / k if k >= stages else found["ZB-H1"]
    expected = {"PETRA, nothing kept": 4, "PETRA, graphs kept": 3, "1F1B": flushed, "ZB-H1": zero_bubble, "GPipe": flushed}
    assert found == pytest.approx(expected)


@pytest.mark.processes
def test_simulator_check_measures_and_predicts_every_method(tmp_path: Path) -> None:
    found, _ = run_processes(2, compare_simulator, tmp_path)
    assert set(found) == set(simulator_check.METHODS)
    for figures in found.values():
        assert min(figures["measured"]) > 0
        assert min(figures["predicted"]) > 0


def compare_simulator(rank: int) -> dict[str, dict[str, list[float]]]:
    options = argparse.Namespace(blocks="1,1", channels=4, size=4, batch=2, k=2, microbatches=4, rounds=1)
    return simulator_check.compare(rank, options)


@pytest.mark.processes
def test_a_reversible_stage_in_its_own_process_stores_nothing(tmp_path: Path) -> None:
    _, (nothing, graphs), _ = run_processes(3, stored_by_keep, tmp_path)
    assert nothing == 0
    assert graphs > 0


def stored_by_keep(rank: int) -> list[float]:
    options = argparse.Namespace(channels=4, size=4, batch=2)
    return [scaling.stage_memory(rank, [2, 2, 2], keep, options)["stored"] for keep in scaling.KEEPS]


def test_a_plan_is_compared_with_runs_in_one_process() -> None:
    options = argparse.Namespace(model="revnet18", width=1 / 16, batch=2, k=2, microbatches=4, rounds=1)
    found = plan_check.compare(options)
    assert set(found) == set(plan_check.ALONE)
    assert all(len(values) == 1 and values[0] > 0 for figures in found.values() for values in figures.values())
