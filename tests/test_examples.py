"""The examples run, at small sizes, and write what they say."""

import os
import runpy
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.structure import ROOT
from tests.support.processes import run_processes

EXAMPLES = ROOT / "examples"


def test_digits_compares_the_methods_and_draws_their_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(EXAMPLES / "digits.py"))
    histories = example["main"](epochs=2, microbatches=2)
    assert {name: len(rows) for name, rows in histories.items()} == {"backprop": 2, "petra": 2, "petra, d = 1": 2}
    assert (tmp_path / "runs/digits.png").read_bytes().startswith(b"\x89PNG")


def test_own_data_learns() -> None:
    example = runpy.run_path(str(EXAMPLES / "own_data.py"))
    assert example["main"](rounds=2) > 0.6
    points, labels = example["Spirals"](5, seed=0), example["Spirals"](5, seed=0)
    assert points.inputs(7).equal(labels.inputs(7))
    assert points.targets(7).equal(labels.targets(7))


def test_the_language_model_beats_a_uniform_guess_and_continues_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "language_model.py"))
    assert example["main"](ROOT / "README.md", microbatches=40) < 5
    assert "The following " in capsys.readouterr().out


def draw(rank: int, folder: Path) -> None:
    """Run the example in the process group that is open already."""
    os.chdir(folder)
    with mock.patch.object(dist, "init_process_group") as opened, mock.patch.object(dist, "destroy_process_group") as closed:
        runpy.run_path(str(EXAMPLES / "four_processes.py"))["main"](microbatches=8, recorded=6)
    assert (opened.call_count, closed.call_count) == (1, 1)


@pytest.mark.processes
def test_four_processes_draw_their_timeline(tmp_path: Path) -> None:
    run_processes(4, draw, tmp_path / "processes", tmp_path)
    assert {"timeline.png", "trace.json"} <= {path.name for path in (tmp_path / "runs/four_processes").iterdir()}


def test_reversible_layers_in_a_loop_and_then_in_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    *loop, pipeline = runpy.run_path(str(EXAMPLES / "reversible_layers.py"))["main"](epochs=1, count=320)
    assert max(loop[0], pipeline) < 2.5
    assert "PETRA with 8 blocks in 4 stages" in capsys.readouterr().out
