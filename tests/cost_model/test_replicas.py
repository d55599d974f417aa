"""What sums over replicas cost."""

import pytest

from petra import METHODS, OuterStep
from petra.cost_model.costs import StageCost
from petra.cost_model.machines import Link
from petra.cost_model.replicas import seconds_per_update, sum_bytes
from petra.cost_model.simulator import predict

LINK = Link(1e6, 0.5)


def test_a_sum_sends_what_a_ring_sends() -> None:
    assert sum_bytes(1000, 4, OuterStep()) == 6000
    assert sum_bytes(1024, 2, OuterStep(8, format="int8")) == 1032
    assert sum_bytes(1000, 2, OuterStep(8, format="bf16")) == 2000
    assert sum_bytes(1000, 4, OuterStep(), shard=True) == 6000 + 3000, "and the weights of a quarter to three others"


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        (OuterStep(), 5.0),  # 4 s and twice the latency, at every update
        (OuterStep(10), 0.5),
        (OuterStep(10, overlap=2), 0.3),  # 3 of 5 s are left after two updates
        (OuterStep(10, overlap=9), 0.0),
        (
            OuterStep(10, overlap=1, format="bf16"),
            0.05 + 0.15,
        ),  # 3 s in halves: one beside an update, then one with nothing beside it
        (OuterStep(10, overlap=4, format="bf16"), 0.0),
    ],
)
def test_an_update_waits_for_what_is_left_of_a_sum(outer: OuterStep, expected: float) -> None:
    assert seconds_per_update(1_000_000, 2, LINK, outer, update=1.0) == pytest.approx(expected)
    assert seconds_per_update(1_000_000, 1, LINK, outer, update=1.0) == 0


def test_a_pipeline_waits_once_in_k_microbatches() -> None:
    costs = [StageCost(1.0, 3.0, seconds_per_update(1_000_000, 2, LINK, OuterStep(), 16.0))] * 4
    assert predict(costs, METHODS["petra"], 4).period == pytest.approx(4 + 5 / 4)
