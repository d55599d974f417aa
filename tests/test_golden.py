"""The comparison of weights with another commit, without training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import golden
from tests.golden import RUNS, _accepted, outcome, translated


def test_runs_are_written_in_words_that_a_tree_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("optim=basis_rotation", "k=2", "optim.ema=0.9")
    assert translated(words, set()) == words
    found = translated(words, {"optim=basis_rotation", "optim.ema=0.9"})
    assert found is not None
    assert (found[0], *found[-2:]) == ("optim=adamw", "k=2", "optim.average=0.9")
    monkeypatch.setattr(golden, "SPELLINGS", (("method.split=", None),))
    assert translated(("k=2", "method.split=input_first"), {"method.split=input_first"}) is None
    assert _accepted(["method.delay=1", "method.delays=1", "remedy=none", "remedy=nothing"]) == [True, False, True, False]
    assert len({run.name for run in RUNS}) == len(RUNS)


def test_outcomes(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", -0.0), ("d", 0.0)):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.tensor([value])}, tmp_path / name / "model.pt")
    found = [outcome(tmp_path / a, tmp_path / b) for a, b in (("a", "b"), ("c", "d"), ("a", "none"), ("none", "a"))]
    assert found == ["equal", "differs", "gone", "new"]
