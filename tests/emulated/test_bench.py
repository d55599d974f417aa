"""``petra bench gpu`` on emulated devices, and the number of launches of a microbatch, which a GPU's host pays for."""

from typing import Any

import pytest
import torch

from launch.bench.measure import CONTESTANTS, TINY, Measurement, measure
from tests.emulated import device as emulated
from tests.emulated.processes import run
from tests.emulated.runs import Case


def measured(rank: int) -> dict[str, dict[str, Any]]:
    """Measure the contestants with small networks, besides "torch DDP, bf16 messages", which asks for the version of CUDA."""
    trials = [Measurement(work, name, 1, 1, tiny=True, details=True) for work in TINY for name in CONTESTANTS[:-1]]
    return {f"{trial.work}: {trial.contestant}": measure(trial, torch.device("cuda", rank), rank, 2) for trial in trials}


def test_contestants_run() -> None:
    """The figures mean nothing, but memory is that of an allocator."""
    first, second = run(measured, world=2, timeout=120)
    assert first == second
    assert len(first) == 2 * (len(CONTESTANTS) - 1)
    for name, found in first.items():
        assert found["samples_per_second"] > 0
        assert min(found["reserved"]) > 0
        assert (found["gbps"] > 0) == ("one device" not in name)
        if "PETRA" in name:
            assert all(size < limit for size, limit in zip(found["reserved"], found["predicted"], strict=True))


def launches(case: Case) -> float:
    """Return the launches of a microbatch, with its share of an update and without what happens once in a run."""
    pipeline, source, counts = case.pipeline("cuda"), case.source(), []
    for microbatches in (4, 8, 16):
        before = emulated.extension.launches()
        pipeline.train(source, microbatches)
        counts.append(emulated.extension.launches() - before)
    return (counts[2] - counts[1]) / 8


@pytest.mark.parametrize(("net", "most"), [("revnet18", 353), ("revnet50", 812), ("revgpt", 423)])
def test_a_microbatch_takes_no_more_launches_than_before(net: str, most: int) -> None:
    assert run(launches, Case(net=net))[0] <= most
