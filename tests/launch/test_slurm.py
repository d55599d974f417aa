"""The shipped Slurm job on a cluster of three nodes on this machine.

Runs only with ``PETRA_TEST_SLURM=1``, because it needs root and adds network namespaces and a bridge to the machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import slurm_suite
from tests.support import slurm


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.environ.get("PETRA_TEST_SLURM") != "1", reason="set PETRA_TEST_SLURM=1 (see tests/slurm_suite.py)")
def test_a_requeued_job_on_unequal_nodes_ends_with_the_bits_of_the_uninterrupted_run(tmp_path: Path) -> None:
    """``python -m tests.slurm_suite`` runs this and all other scenarios."""
    assert (reason := slurm.missing()) is None, reason
    with slurm.cluster(tmp_path / "slurm", nodes=3) as running:
        assert "resumed after microbatch" in slurm_suite.requeue(slurm_suite.Suite(running, tmp_path))
