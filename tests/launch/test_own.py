"""Models and data sets outside the package (docs/own_model.md): trained, resumed, evaluated and swept from the command line."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.config.compose import compose_overrides
from launch.evaluate import main as evaluate
from launch.run.build import set_up
from launch.sweep import jobs
from petra import ConfigError
from petra.data import DATASETS
from petra.models import MODELS
from tests.launch.test_launch import ALONE, ROOT
from tests.support.forked import Forked

OWN = ("model=own", "model.name=mine:network", "data=own", "data.name=mine:rows", "data.classes=3", "data.size=8")
SMALL = ("data.batch_size=8", "optim.lr=0.05", "trainer.device=cpu", "trainer.stages=2", "run_dir=run")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a working directory with examples/own_functions.py as the module ``mine``. The test leaves no trace of the module."""
    shutil.copyfile(ROOT / "examples" / "own_functions.py", tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield tmp_path
    for registry in (MODELS, DATASETS):
        for name in [name for name in registry if ":" in name]:
            del registry[name]  # type: ignore[attr-defined]


@pytest.mark.processes
def test_an_own_model_and_data_set_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Forked(folder, [*OWN, *SMALL, "trainer.epochs=1"], 2) as run:
        run.finish()
    with Forked(folder, [*OWN, *SMALL, "trainer.epochs=2", "resume=auto"], 1) as run:
        printed, _ = run.finish()
    assert "resuming from run/checkpoints/" in printed
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["model"], summary["data"], summary["epochs"]) == ("mine", "mine:rows", 2)
    evaluate(["run=run"])
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(summary["test_accuracy"])
    assert [job.config.model.name for job in jobs([*OWN, "k=1,2"], folder)] == ["mine:network"] * 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.name=none_such:build"], r"model\.name: none_such can't be imported \(ModuleNotFoundError: No module named 'none_"),
        (
            ["model.name=mine:rows"],
            "model.name: expected a function that can be called with classes, size, got mine:rows",
        ),
        (
            ["data.name=mine:network"],
            "data.name: expected a function that returns a petra.data.Dataset, got mine:network",
        ),
        (["data.classes=4"], r"data\.classes: expected 3 for rows, got 4"),
        (["model.name=mine.py"], "model.name: expected resnet18, .* or module:function, got mine.py"),
    ],
)
def test_errors_of_own_functions_are_one_line(overrides: list[str], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        set_up(compose_overrides([*OWN, *SMALL, *overrides]), ALONE)
