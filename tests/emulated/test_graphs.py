"""Passes of blocks as CUDA graphs on the emulated device, and the number of launches of a microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from petra import Keep, Method, ModelError, Weights
from petra.engine.graphs import WARM_UP, BlockGraphs, Pools
from petra.hooks import Hook
from petra.specs import Streams
from tests.emulated import device, runs
from tests.emulated.device import Options
from tests.emulated.processes import run
from tests.emulated.runs import Case
from tests.emulated.test_streams import CASES, differences
from tests.emulated.test_training import excess

GRAPHS = {"cuda_graphs": True}
KINDS = [GRAPHS, {"overlap": True, **GRAPHS}, {"overlap": True, "stage_streams": True, **GRAPHS}]


@pytest.mark.parametrize("name", ["petra", "revnet", "dropout", "stages", "stashed", "adam, rules", "remedies", "fp16"])
def test_graphs_change_no_bits(name: str) -> None:
    (found,) = run(differences, Case(**CASES[name]), KINDS, [1, 2], options=Options(seed=1, delay_rate=0.1), timeout=120)
    assert found == [0] * 6


@pytest.mark.parametrize("method", ["reversible", "dsp", "pipedream", Method("x", 1, Keep.INPUT, Weights.CURRENT)])
def test_graphs_of_other_methods(method: Any) -> None:
    (found,) = run(differences, Case(method), [GRAPHS], [1], options=Options(seed=1, delay_rate=0.1))
    assert found == [0]


def test_the_host_waits_for_captures_only() -> None:
    """torch synchronizes the device when a capture starts: once for each of the passes."""
    case = Case(microbatches=60, runtime=GRAPHS)
    ((found, _),) = run(runs.synchronizations, case)
    captured = 2 * 5  # the head stores its graph
    syncs = {place: n for place, n in found.items() if "graphs.py" in place}
    assert sum(syncs.values()) <= 2 * captured
    assert excess({place: n for place, n in found.items() if place not in syncs}, case) == {}


class Launches(Hook):
    """Counts the launches of each stage's passes and updates."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, str], list[int]] = {}
        self._start = 0

    def _begin(self) -> None:
        self._start = device.extension.launches()

    def _end(self, stage: int, kind: str) -> None:
        self.counts.setdefault((stage, kind), []).append(device.extension.launches() - self._start)

    def forward_begin(self, stage: int, m: int, x: Streams) -> None:
        self._begin()

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        self._end(stage, "F")

    def backward_begin(self, stage: int, m: int, y: Streams, dy: Streams) -> None:
        self._begin()

    def backward_end(self, stage: int, m: int, x: Streams, dx: Streams) -> None:
        self._end(stage, "B")


def launches(case: Case) -> tuple[int, dict[tuple[int, str], int]]:
    """Return the launches of a microbatch in the steady state, with updates, and those of each stage's passes."""
    pipeline, source, hook = case.pipeline("cuda"), case.source(), Launches()
    first = 6 * case.k  # all passes have been captured, and libraries are warm
    pipeline.train(source, first)
    before = device.extension.launches()
    with pipeline.hooks.attached(hook):
        pipeline.train(source, case.microbatches)
    total = (device.extension.launches() - before) / case.microbatches
    return round(total), {key: min(counts) for key, counts in hook.counts.items()}


BUDGET = {
    ("revnet18", False): (386, 7, 17),
    ("revnet18", True): (224, 3, 4),
    ("revnet50", False): (882, 10, 24),
    ("revnet50", True): (400, 3, 4),
}
"""Launches of a microbatch with k = 2, and of both passes of a stage that is one reversible block, without and with graphs.
Before updates were merged, a microbatch took 599 and 1,389 launches."""


@pytest.mark.parametrize(("net", "graphs"), BUDGET)
def test_launches_stay_within_the_budget(net: str, graphs: bool) -> None:
    case = Case(net=net, k=2, microbatches=8, runtime={"cuda_graphs": graphs})
    ((total, stages),) = run(launches, case, timeout=200)
    most, forward, backward = BUDGET[net, graphs]
    assert total <= most
    assert stages[2, "F"] <= forward
    assert stages[2, "B"] <= backward
    assert max(stages.values()) <= (6 if graphs else 34)  # of any pass; the head stores its graph


def uncapturable() -> str:
    graphs, x = BlockGraphs(nn.Identity(), Pools.create()), (torch.ones(3, device="cuda"),)
    for _ in range(WARM_UP):
        graphs.forward(lambda tensors: (tensors[0] * tensors[0].sum().item(),), x)
    with pytest.raises(ModelError) as caught:
        graphs.forward(lambda tensors: (tensors[0] * tensors[0].sum().item(),), x)
    return str(caught.value)


def test_a_block_that_reads_values_is_refused() -> None:
    text = run(uncapturable)[0]
    assert text.startswith("trainer.cuda_graphs: Identity can't be captured (CUDA error: operation not permitted")
    assert text.endswith("use trainer.cuda_graphs=false")
