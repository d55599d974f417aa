"""What a run prints is what it did: numbers that could be of something else say of what they are."""

import json
import math
import re
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launch import compare, evaluate, report, resume
from petra.diagnostics.process_memory import peak_memory
from petra.engine.totals import Result
from petra.training import Lines
from petra.training.trainer import means
from petra.training.watchers import Means
from tests.support.commands import TINY, lines, train

PART = "test (first 1 of 2 microbatches, moving average of the weights)"
"""What the runs here evaluate."""


def test_parts_smoothing_and_averages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the lines of a run, its report, an evaluation, and after resuming."""
    monkeypatch.chdir(tmp_path)
    train(*TINY, "k=1", "trainer.limit_batches=1", "trainer.label_smoothing=0.1", "optim.average=0.9", "run_dir=r")
    out = capsys.readouterr().out
    headline, epoch, last = (line for line in out.splitlines() if not line.startswith(("note:", "warning:")))
    assert f"training loss: (label smoothing 0.1); evaluation: {PART}; epoch: 1 microbatches; records in r" in headline
    assert re.search(rf"^epoch 1/1: \(label smoothing 0\.1\) loss [\d.]+, .*; {re.escape(PART)} loss [\d.]+, ", epoch)
    assert re.fullmatch(rf"{re.escape(PART)} accuracy [\d.]+% after \d+ s; records in r", last)
    assert f"evaluation: {PART}" in Path("r/report.html").read_text()
    evaluate.main(["r"])
    found = json.loads(capsys.readouterr().out)
    assert (found["evaluated"], found["images"]) == ("test (first 1 of 2 microbatches)", 8)
    assert found["loss"] != lines(Path("r/metrics.jsonl"))[0]["test_loss"], "its weights are those without the average"
    compare.main(["r"])
    header, _, cells = ([cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines())
    said = {"trainer.limit_batches": "1", "trainer.label_smoothing": "0.1", "optim.average": "0.9"}
    assert said.items() <= dict(zip(header, cells, strict=True)).items()
    monkeypatch.setattr("sys.argv", ["petra", "r", "trainer.epochs=2"])
    resume.main()
    assert re.search(
        rf"{re.escape(PART)} accuracy [\d.]+% after \d+ s since it was resumed after microbatch 1; ", capsys.readouterr().out
    )


def test_no_targets_give_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither of an epoch nor of some updates: zero would be a perfect one."""
    recipe = SimpleNamespace(metrics={"accuracy": len}, learning_rate=None)
    assert all(map(math.isnan, means(Result.of([0.0, 0.0, 0.0], recipe.metrics), "tokens", 4.0).values()))
    some = Means(recipe)  # type: ignore[arg-type]
    some.add(torch.zeros(3))
    count, found = some.values()
    assert (count, *map(math.isnan, found.values())) == (0, True, True)
    row = {"epoch": 1, "train_loss": 2.0, "test_loss": math.nan, "images_per_second": 1.0, "learning_rate": 0.1, "seconds": 1.0}
    Lines(1, 1, recipe).epoch_end(row)  # type: ignore[arg-type]
    assert capsys.readouterr().out.startswith("epoch 1/1: loss 2.0000; test loss nan; ")


def test_the_peak_of_memory_is_not_that_of_the_process_that_started_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux passes the peak of the parent on in ru_maxrss."""
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=2**40))
    total = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024  # type: ignore[index]
    assert 2**24 < peak_memory(torch.device("cpu")) < total


def test_the_best_epoch_is_one_that_has_an_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An epoch without targets has none; the order of the epochs does not matter."""
    monkeypatch.chdir(tmp_path)
    train(*TINY, "k=1", "run_dir=r")
    (row,) = lines(Path("r/metrics.jsonl"))
    rows = [row | {"epoch": e, "test_accuracy": value} for e, value in ((1, None), (2, 0.5), (3, 0.4))]
    Path("r/metrics.jsonl").write_text("".join(json.dumps(found) + "\n" for found in rows))
    Path("r/summary.json").unlink()
    capsys.readouterr()
    compare.main(["r"])
    assert capsys.readouterr().out.rstrip().endswith("| 40.00% | 50.00% |")
    report.main(["r"])
    assert re.search(r"<b>50\.00%</b>\s*<span>best test accuracy", Path("r/report.html").read_text())
