"""Starts of a run: default folders, initial weights of a part of the blocks, settings that a resumed run changes."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from launch.config.compose import compose_overrides
from launch.run.folder import default_folder
from launch.run.resume import Start, load_start
from launch.run.training import run
from petra import ConfigError, PetraError
from petra.engine.weights import DoubleWeights, WeightVersion
from petra.training import load
from tests.launch.test_launch import ALONE, TINY, planned

pytestmark = pytest.mark.usefixtures("shared_profiles")

SMALL = (*TINY, "data.size=16", "data.images=32", "model.width=0.25", "trainer.stages=2", "k=2", "trainer.export=pt")


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the folder of a finished run of one epoch in the working directory: four microbatches, two updates."""
    monkeypatch.chdir(tmp_path)
    train("run_dir=first")
    capsys.readouterr()
    return Path("first")


def train(*overrides: str) -> None:
    run(compose_overrides([*SMALL, *overrides]), ALONE)


def test_runs_that_start_in_the_same_second_have_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose_overrides(SMALL)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(default_folder, [config] * 24))
    assert len({*folders}) == 24
    assert all(folder.parent == Path("runs") and folder.is_dir() for folder in folders)


def test_weights_of_a_network_with_another_head(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["data.classes=7", "trainer.epochs=1", "optim.lr=0"]
    with pytest.raises(PetraError, match=r"model\.pt: block head does not fit"):
        train(*more, f"init_from={trained}", "run_dir=refused")
    train(*more, f"init_from={trained}", "init_skip=[head]", "run_dir=tuned")
    assert f"initial weights of 9 of 10 blocks from {trained}/model.pt; random: head" in capsys.readouterr().out
    before, after = load(trained / "model.pt"), load(Path("tuned/model.pt"))
    assert after["head.linear.weight"].shape[0] == 7
    weights = [key for key in before if key.endswith("weight") and not key.startswith("head.")]
    assert weights
    assert all(torch.equal(before[key], after[key]) for key in weights)
    with pytest.raises(PetraError, match=r"init_skip: expected names of blocks \(stem, .*, head\), got classifier"):
        train(f"init_from={trained}", "init_skip=[classifier]", "run_dir=wrong")


def test_a_folder_of_a_run_gives_its_export_or_its_checkpoint(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(f"init_from={trained}", "run_dir=second")
    assert f"initial weights of 10 of 10 blocks from {trained}/model.pt\n" in capsys.readouterr().out
    (trained / "model.pt").unlink()
    train(f"init_from={trained}", "run_dir=third")
    assert f"initial weights of 10 of 10 blocks from {trained}/checkpoints/000000004\n" in capsys.readouterr().out


def test_a_resumed_run_changes_only_what_resume_change_names(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = ("run_dir=first", "resume=auto", "trainer.epochs=2", "optim.lr=0.5", "schedule.gamma=0.3")
    with pytest.raises(PetraError, match=r"optim\.lr: expected 0\.1 as in .* \(resume_change=\[optim\.lr\] allows another value\)"):
        train(*again)
    with pytest.raises(PetraError, match=r"schedule\.gamma: expected 0\.1 as in"):
        train(*again, "resume_change=[optim.lr]")
    train(*again, "resume_change=[optim.lr,schedule]")
    assert "optim.lr is 0.5 from here on, was 0.1" in capsys.readouterr().out
    rows = [json.loads(line) for line in (trained / "changes.jsonl").read_text().splitlines()]
    assert rows == [
        {"microbatch": 4, "key": "optim.lr", "before": 0.1, "now": 0.5},
        {"microbatch": 4, "key": "schedule.gamma", "before": 0.1, "now": 0.3},
    ]
    assert len((trained / "metrics.jsonl").read_text().splitlines()) == 2
    with pytest.raises(PetraError, match=r"resume_change: expected a list of keys and groups, got optim\.rate"):
        train(*again, "resume_change=[optim.rate]")


def test_a_run_resumes_without_its_config_file(trained: Path) -> None:
    """The checkpoint has the configuration, so a damaged config.yaml is replaced."""
    before = (trained / "config.yaml").read_text()
    (trained / "config.yaml").write_bytes(b"\0: [damaged")
    train("run_dir=first", "resume=auto", "trainer.epochs=2")
    assert (trained / "config.yaml").read_text() == before.replace("epochs: 1", "epochs: 2").replace("resume: null", "resume: auto")


def test_another_batch_size_begins_with_an_epoch(trained: Path) -> None:
    """An epoch has 4 microbatches of 8 images, then 8 of 4 images: the clock of the resumed run begins at 8."""
    train("run_dir=first", "resume=auto", "trainer.epochs=2", "data.batch_size=4", "resume_change=[data.batch_size]")
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["microbatches"]) for row in rows] == [(1, 4), (2, 16)]


def test_another_batch_size_within_an_epoch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train("run_dir=first", "checkpoint.every=2", "checkpoint.keep=5")
    changed = ("data.batch_size=4", "resume_change=[data.batch_size]", "trainer.epochs=2", "run_dir=second")
    message = r"data\.batch_size: expected 8 as in .*000000002; only a checkpoint at the end of an epoch and of an update allows"
    with pytest.raises(PetraError, match=message):
        train("resume=first/checkpoints/000000002", *changed)


def test_double_weights_follow_a_clock_that_moves(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PipeDream-2BW's first update after the change uses the older weights in its forward passes, as any other."""
    used: list[bool] = []
    forward = DoubleWeights.for_forward

    def recorded(self: DoubleWeights, m: int) -> WeightVersion | None:
        version = forward(self, m)
        used.append(version is not None and version is self.previous)
        return version

    two_versions = ("method=pipedream_2bw", "k=2")
    train(*two_versions, "run_dir=double")
    monkeypatch.setattr(DoubleWeights, "for_forward", recorded)
    again = ("run_dir=double", "resume=auto", "trainer.epochs=2", "data.batch_size=4", "resume_change=[data.batch_size]")
    train(*two_versions, *again)
    assert any(used)


def test_other_files_of_the_same_data_begin_with_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of an epoch depends on the size of a text file."""
    monkeypatch.chdir(tmp_path)
    for name, size in (("a", 400), ("b", 700)):
        Path(name).mkdir()
        (Path(name) / "text.txt").write_text("abcdefghij" * (size // 10))
    shape = ("model.dim=8", "model.depth=1", "model.heads=2", "data.size=8", "data.batch_size=4", "trainer.device=cpu")
    text = ("data=text", "model=revgpt", *shape, "k=1", "trainer.stages=2", "run_dir=text")

    def epochs(*overrides: str) -> list[tuple[int, int]]:
        run(compose_overrides([*text, *overrides]), ALONE)
        rows = [json.loads(line) for line in Path("text/metrics.jsonl").read_text().splitlines()]
        return [(row["epoch"], row["microbatches"]) for row in rows]

    ((_, first),) = epochs("data.root=a/text.txt", "trainer.epochs=1")
    (_, (_, second)) = epochs("data.root=b/text.txt", "trainer.epochs=2", "resume=auto")
    assert second % 2 == 0
    assert second > 2 * first


def test_shorter_epochs_need_another_folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves back, and the folder's older checkpoints would count as newer."""
    larger = ("trainer.epochs=2", "data.batch_size=16", "resume_change=[data.batch_size]")
    message = r"run_dir: expected another folder than that of the checkpoint, for epochs of 2 microbatches instead of 4"
    with pytest.raises(PetraError, match=message):
        train("run_dir=first", "resume=auto", *larger)
    with pytest.raises(PetraError, match=message):
        train("run_dir=first", "resume=first", *larger)
    train("run_dir=second", "resume=first", *larger)
    rows = [json.loads(line) for line in Path("second/metrics.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["microbatches"]) for row in rows] == [(1, 4), (2, 4)]


def test_a_checkpoint_of_an_earlier_version_has_no_length_of_an_epoch(trained: Path) -> None:
    (facts,) = trained.glob("checkpoints/*/facts.json")
    content = json.loads(facts.read_text())
    del content["trainer"]["epoch"]
    start = Start(facts.parent, content, {"data.batch_size": (8, 4)})
    setup = planned(*SMALL, "data.batch_size=4", "trainer.epochs=2")
    pipeline = setup.pipeline(setup.learning_rate(8))
    load_start(pipeline, setup.config, start, 8)
    assert pipeline.clock == 8


def test_another_optimizer_cannot_resume(trained: Path) -> None:
    message = (
        r"optim\.name: expected sgd as in .*000000004, which the run resumes from \(init_from starts from its weights\), got adamw"
    )
    with pytest.raises(PetraError, match=message):
        train("run_dir=first", "resume=auto", "trainer.epochs=2", "optim=adamw", "resume_change=[optim,schedule]")


def test_a_moving_average_may_begin_when_a_run_resumes(trained: Path) -> None:
    train("run_dir=first", "resume=auto", "trainer.epochs=2", "optim.ema=0.9", "resume_change=[optim.ema]")
    assert Path("first/ema.pt").exists()


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"init_skip: expected null without init_from, got \['head'\]"):
        planned("init_skip=[head]")
    with pytest.raises(ConfigError, match=r"resume_change: expected null without resume, got \['k'\]"):
        planned("resume_change=[k]")


def test_a_run_folder_without_weights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("empty")
    Path("empty/config.yaml").touch()
    with pytest.raises(PetraError, match="init_from: expected a folder with exported weights or checkpoints, got empty"):
        train("init_from=empty", "run_dir=run")
