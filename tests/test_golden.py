"""The comparison of weights with another commit, without training."""

import shutil
from pathlib import Path

import torch

from launch.config.compose import compose_overrides
from tests.golden import RUNS, outcome


def test_every_run_composes_and_has_a_name_of_its_own(tmp_path: Path) -> None:
    for run in RUNS:
        for words in run.starts:
            compose_overrides([word.replace("FILES", str(tmp_path)) for word in words])
    assert len({run.name for run in RUNS}) == len(RUNS)


def test_outcomes(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", -0.0), ("d", 0.0)):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.tensor([value])}, tmp_path / name / "model.pt")
        (tmp_path / name / "metrics.jsonl").write_text('{"train_loss": 0.5, "seconds": 1}\n')
    shutil.copytree(tmp_path / "a", tmp_path / "e")
    (tmp_path / "e" / "metrics.jsonl").write_text('{"train_loss": 0.25, "seconds": 1}\n')
    (tmp_path / "b" / "metrics.jsonl").write_text('{"train_loss": 0.5, "seconds": 2}\n')
    pairs = ("a", "b"), ("c", "d"), ("a", "none"), ("none", "a"), ("a", "e")
    assert [outcome(tmp_path / a, tmp_path / b) for a, b in pairs] == [
        "equal",
        "differs",
        "gone",
        "new",
        "differs in metrics.jsonl",
    ]
