"""A short soak test. ``python -m stress.soak`` runs a long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from stress import soak


def test_files_stay_closed_from_epoch_to_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "EPOCHS", 20)
    row = soak.compared(soak.train(0, 80, "auto", str(tmp_path / "checkpoints")), 80)
    assert row["files"]["last"] <= row["files"]["second"]


def test_growth_is_reported() -> None:
    def grew(memory: float, files: int) -> bool:
        samples = [
            {"memory": 1e8 + memory * i, "files": 9.0 + files * (i > 50), "seconds": 1.0, "processor_seconds": 1.0}
            for i in range(soak.EPOCHS)
        ]
        return soak.grew(soak.compared(samples, 1000))

    assert not grew(1e4, 0)
    assert grew(2e4, 0)
    assert grew(0, 1)
