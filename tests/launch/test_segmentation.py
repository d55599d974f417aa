"""Segmentation runs from a configuration: training, evaluation, and settings that don't fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from launch import evaluate
from petra.data import load_dataset
from petra.models import resnet18
from petra.training import load, read_rows
from tests.support.fakes import write_image_folders
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
    with Forked(base, words, 2) as started:
        started.finish()
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
    evaluate.main([f"{folder}", *changes])
    found, last = json.loads(capsys.readouterr().out), read_rows(folder / "metrics.jsonl")[-1]
    assert found["pixels"] == 3 * 39 * 60
    for name in ("loss", "accuracy", "miou"):
        assert found[name] == pytest.approx(last[f"test_{name}"], rel=1e-5)
    shares = [iou for iou in found["iou"].values() if iou is not None]
    assert [*found["iou"]] == ["0", "1", "2"]
    assert found["miou"] == pytest.approx(sum(shares) / len(shares))


@pytest.mark.processes
def test_classification_as_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train with in-place leaky ReLU; evaluate with ReLU, against a forward by hand."""
    write_image_folders(tmp_path / "data", train=4, val=2)
    words = ["data=imagenet", f"data.root={tmp_path}/data", "data.classes=3", "data.size=32", "data.workers=0", "data.batch_size=4"]
    words += ["model=resnet18", "model.width=0.125", "model.norm=inplace_abn"]
    arguments = [*words, "trainer.epochs=1", "run_dir=run", "trainer.device=cpu", "trainer.export=pt", "k=1"]
    with Forked(tmp_path, arguments, 1) as started:
        started.finish()
    test = load_dataset("imagenet", root=tmp_path / "data", size=32).test
    images, targets = (read(torch.arange(6), None) for read in (test.inputs, test.targets))
    network = resnet18(3, 0.125, activation="relu").build(0)
    network.load_state_dict(load(tmp_path / "run" / "model.pt"))
    with torch.no_grad():
        scores = network.eval()(images)
    evaluate.main([f"{tmp_path}/run", "model.norm=batchnorm", "model.activation=relu"])
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 6
    assert found["loss"] == pytest.approx(float(F.cross_entropy(scores, targets)), rel=1e-4)
    assert found["accuracy"] == pytest.approx(float((scores.argmax(1) == targets).float().mean()))
