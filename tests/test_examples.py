"""The examples run, at small sizes, and write what they say."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structure import ROOT

EXAMPLES = ROOT / "examples"


def test_digits_compares_the_methods_and_draws_their_curves(tmp_path: Path) -> None:
    example = runpy.run_path(str(EXAMPLES / "digits.py"))
    picture = tmp_path / "digits.png"
    histories = example["main"](epochs=2, microbatches=2, picture=picture)
    assert {name: len(rows) for name, rows in histories.items()} == {"backprop": 2, "petra": 2, "petra, d = 1": 2}
    assert picture.read_bytes().startswith(b"\x89PNG")


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


@pytest.mark.processes
def test_four_processes_draw_their_timeline(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(EXAMPLES / "four_processes.py")], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert {"timeline.png", "trace.json"} <= {path.name for path in tmp_path.iterdir()}
