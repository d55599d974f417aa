"""The comparison of weights with another commit, without training."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.golden import RUNS, _accepted, outcome, spelling, translated


def test_refused_words_are_translated() -> None:
    words = ("optim=basis_rotation", "k=2", "data.name=own:data")
    found = translated(words, {"optim=basis_rotation", "data.name=own:data"})
    assert found is not None
    assert found[0] == "optim=adamw"
    assert found[-2:] == ("k=2", "data._target_=own:data")
    assert translated(words, set()) == words


def test_runs_without_what_a_tree_has_removed_are_left_out() -> None:
    assert translated(("k=2", "method.split=input_first"), {"method.split=input_first"}) is None
    assert spelling("k=2") is None


def test_names_of_runs_differ() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS)


def test_a_tree_refuses_keys_and_files_that_it_lacks() -> None:
    assert _accepted(["method.delay=1", "method.delays=1", "remedy=none", "remedy=nothing"]) == [True, False, True, False]


def test_outcomes(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", -0.0), ("d", 0.0)):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.tensor([value])}, tmp_path / name / "model.pt")
    assert outcome(tmp_path / "a", tmp_path / "b") == "equal"
    assert outcome(tmp_path / "c", tmp_path / "d") == "differs"
    assert outcome(tmp_path / "a", tmp_path / "none") == "gone"
    assert outcome(tmp_path / "none", tmp_path / "a") == "new"
