from pathlib import Path

import pytest

from petra.cost_model.links import INSTANT, Link, measure_link
from tests.support.processes import run_processes


def test_one_process_has_no_link() -> None:
    assert measure_link() == INSTANT


@pytest.mark.processes
def test_all_processes_get_the_same_link(tmp_path: Path) -> None:
    first, *others = run_processes(3, measured_link, tmp_path)
    assert others == [first, first]
    assert 0 < first.latency < 1
    assert 0 < first.bandwidth < float("inf")


def measured_link(rank: int) -> Link:
    return measure_link(rounds=2, nbytes=1 << 16)
