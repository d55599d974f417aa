"""A short soak test. ``python -m tests.soak`` runs a long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import soak
from tests.support.processes import run_processes


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["lockstep", "edge"])
def test_nothing_grows_from_epoch_to_epoch(transport: str, tmp_path: Path) -> None:
    """Four processes run 100 evaluations and checkpoints."""
    samples = run_processes(soak.WORLD, soak.train, tmp_path / "run", 4 * soak.EPOCHS, transport, str(tmp_path / "checkpoints"))
    rows = [soak.compared(own, 4 * soak.EPOCHS) for own in samples]
    for row in rows:
        assert row["files"]["last"] <= row["files"]["second"]
        assert row["memory"]["last"] <= 1.03 * row["memory"]["second"], soak.table(rows)


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
