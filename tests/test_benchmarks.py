"""Test that the contestants of the benchmarks compute the same, and run benchmark commands with tiny sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import pipelines, reversible_sequence
from benchmarks.reversible_peers import LIBRARIES, PEERS, gradients


@pytest.mark.parametrize("name", PEERS)
def test_reversible_peers_have_the_gradients_of_plain_autograd(name: str) -> None:
    if name in LIBRARIES:
        pytest.importorskip(name.lower())
    branches, x = reversible_sequence.build(4, channels=4, size=4, batch=2, dtype=torch.float64)
    found, expected = (gradients(n, branches, x) for n in (name, "plain autograd"))
    assert expected.norm() > 0
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def run(main: object, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[str, object]:
    """Run a benchmark, and return the figures that it saves."""
    monkeypatch.setattr(sys, "argv", ["benchmark", "--out", str(folder / "figures.json"), "--rounds", "1", *arguments])
    main()  # type: ignore[operator]
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.processes
def test_pipelines_make_plain_updates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command, which itself compares each contestant's first update with plain autograd's."""
    sizes = ["--k=1,3", "--blocks=2", "--channels=4", "--size=4", "--batch=2", "--microbatches=1", "--threads=1"]
    found = run(pipelines.main, monkeypatch, tmp_path, *sizes)
    missing = found["not_installed"]
    assert set(found["periods"]) == {"1", "3"}
    for row in found["periods"].values():
        assert set(row) | set(missing) == set(pipelines.CONTESTANTS)
        assert min(seconds for times in row.values() for seconds in times) > 0
    printed = capsys.readouterr().out
    assert all(f"{name}: not installed" in printed for name in missing)
    assert "| 18 | 3 | " in printed
