"""The shipped Slurm job on a cluster of three nodes on this machine. Skipped without Slurm and root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import slurm_suite
from tests.support import slurm

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(slurm.missing() is not None, reason=f"{slurm.missing()}; tests/slurm_suite.py tells what is needed"),
]


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[slurm_suite.Suite]:
    with slurm.cluster(tmp_path / "slurm", nodes=3) as running:
        yield slurm_suite.Suite(running, tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", ["chosen_numbers", "requeue"])
def test_a_scenario_of_the_suite(scenario: str, suite: slurm_suite.Suite) -> None:
    """``python -m tests.slurm_suite`` runs all scenarios."""
    assert slurm_suite.SCENARIOS[scenario](suite)
