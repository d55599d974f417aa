"""Ranks that make different calls of a pipeline: an error on every rank that names both calls."""

from pathlib import Path
from typing import Any

import pytest

from petra.errors import PetraError
from petra.training import Checkpoints
from tests.support.nets import RandomSource, mixed, weights
from tests.support.processes import run_processes

CALLS: dict[str, Any] = {
    "Pipeline.train(4 microbatches, stop=None)": lambda p, folder: p.train(RandomSource(), 4),
    "Pipeline.train(5 microbatches, stop=None)": lambda p, folder: p.train(RandomSource(), 5),
    "Pipeline.train(4 microbatches, stop=a function)": lambda p, folder: p.train(RandomSource(), 4, stop=lambda: False),
    "Pipeline.evaluate(4 microbatches)": lambda p, folder: p.evaluate(RandomSource(), 4),
    "Pipeline.stage_metrics()": lambda p, folder: p.stage_metrics(),
    "Checkpoints.save(000000002)": lambda p, folder: Checkpoints(Path(folder)).save(p, {}),
}


def differ(rank: int, folder: str) -> list[tuple[str, str, str]]:
    """Make each call on rank 0 while rank 1 makes the next one, and then the same calls. Return what was raised."""
    found, pipeline = [], mixed(stages=2)
    pipeline.train(RandomSource(), 2)
    names = [*CALLS]
    for pair in zip(names, [*names[1:], names[0]], strict=True):
        with pytest.raises(PetraError) as caught:
            CALLS[pair[rank]](pipeline, folder)
        found.append((*pair, str(caught.value)))
    pipeline.train(RandomSource(), 4)
    return [*found, ("", "", str(sum(float(t.double().sum()) for t in weights(pipeline).values())))]


def test_ranks_that_make_different_calls_name_both(tmp_path: Path) -> None:
    ranks = run_processes(2, differ, tmp_path, str(tmp_path), timeout=60)
    for rank in ranks:
        for first, second, message in rank[:-1]:
            assert (
                message == f"calls: expected the same on all ranks, in the same order, got {first} on rank 0 and {second} on rank 1"
            )
    expected = mixed(stages=2)
    for count in (2, 4):
        expected.train(RandomSource(), count)
    assert sum(float(rank[-1][2]) for rank in ranks) == pytest.approx(
        sum(float(t.double().sum()) for t in weights(expected).values())
    )
