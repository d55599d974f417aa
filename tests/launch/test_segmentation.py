"""Segmentation runs from a configuration: training, evaluation, and settings that don't fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from launch import evaluate
from launch.config.compose import compose_overrides
from launch.run.build import set_up
from launch.run.dry_run import memory_table
from launch.runtime.rank import Process
from petra.errors import ConfigError
from petra.training import read_rows
from tests.support.forked import Forked

NETWORK = ("model=deeplabv3", "model.body=revnet18", "model.width=0.125", "model.norm=inplace_abn")
SHAPE = ("data=segmentation", "data.classes=3", "data.size=32", "data.height=24", "data.batch_size=4", "data.workers=0")
RUN = (*NETWORK, *SHAPE, "trainer.epochs=2", "trainer.device=cpu", "trainer.export=pt", "k=1", "trainer.bootstrap=0.25")


def write_folders(root: Path) -> None:
    """Write images of three colours: the class of a pixel is its colour."""
    for split, count in (("train", 8), ("val", 3)):
        for i in range(count):
            small = np.random.default_rng(i).integers(0, 3, (4, 6), dtype=np.uint8)
            labels = np.kron(small, np.ones((10, 10), np.uint8))
            labels[0] = 255
            for kind, pixels in (("labels", labels), ("images", np.eye(3, dtype=np.uint8)[labels % 3] * 200)):
                path = root / kind / split / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a short run in two processes, with class-uniform sampling."""
    base = tmp_path_factory.mktemp("segmentation")
    write_folders(base / "data")
    words = [*RUN, f"data.root={base}/data", "run_dir=run", "trainer.stages=3", "data.sampling=class_uniform"]
    with Forked(base, words, 2) as run:
        run.finish()
    return base / "run"


@pytest.mark.processes
def test_records_have_the_miou(folder: Path) -> None:
    rows = read_rows(folder / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert {"train_miou", "test_miou", "train_accuracy", "pixels_per_second"} <= row.keys()
        assert 0 < row["test_miou"] < 1
    assert "counts" not in json.dumps(json.loads((folder / "summary.json").read_text()))


@pytest.mark.processes
@pytest.mark.parametrize("changes", [[], ["data.batch_size=5"]])
def test_evaluation_repeats_the_last_epochs(folder: Path, changes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    evaluate.main([f"run={folder}", *changes])
    found, last = json.loads(capsys.readouterr().out), read_rows(folder / "metrics.jsonl")[-1]
    assert found["pixels"] == 3 * 39 * 60
    for name in ("loss", "accuracy", "miou"):
        assert found[name] == pytest.approx(last[f"test_{name}"], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.size=30"], "data.size: expected a multiple of 8 with model=deeplabv3, got 30"),
        (["data.height=20"], "data.height: expected a multiple of 8 with model=deeplabv3, got 20"),
        (["model=revnet18"], "model: expected deeplabv3 with data=segmentation, got revnet18"),
        (["data=digits", "data.height=null"], "model: expected a model of images with data=digits, got deeplabv3"),
        (["trainer.bootstrap=0"], "trainer.bootstrap: expected null or a number > 0 and <= 1, got 0.0"),
        (
            ["data=digits", "trainer.bootstrap=0.5"],
            "trainer.bootstrap: expected null with data=digits, which has no pixels, got 0.5",
        ),
        (["data=cityscapes", "data.void=3"], "data.void: expected null for cityscapes, got 3"),
    ],
)
def test_settings_that_do_not_fit_are_errors(words: list[str], message: str) -> None:
    own = () if any(word == "data=digits" for word in words) else SHAPE
    with pytest.raises(ConfigError) as error:
        set_up(compose_overrides([*NETWORK, *own, *words]), Process.from_environment())
    assert message in str(error.value)


def test_a_dry_run_predicts_the_memory() -> None:
    setup = set_up(compose_overrides([*NETWORK, *SHAPE, "trainer.stages=2", "trainer.device=cpu"]), Process.from_environment())
    assert setup.plan.boundaries[0].backward[-1][0].shape == (2 + 1 + 9,)
    assert "total (MB)" in memory_table(setup)
