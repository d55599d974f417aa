"""The drift of weights between forward and backward passes, against copies of all weights."""

from math import isnan

import pytest
from torch import Tensor, nn

from petra import ConfigError, Pipeline
from petra.diagnostics.weight_drift import WeightDrift, distance
from petra.hooks import Hook
from petra.specs import Streams
from tests.support.nets import RandomSource, mixed


def built(method: str = "petra", k: int = 2) -> Pipeline:
    return mixed(method=method, k=k, stages=3, seed=2)


class Copies(Hook):
    """All weights of each stage at F and at B of each microbatch."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.found = pipeline, dict[tuple[str, int, int], Tensor]()

    def note(self, op: str, stage: int, m: int) -> None:
        self.found[op, stage, m] = nn.utils.parameters_to_vector(self.pipeline.stages[stage].module.parameters()).detach().clone()

    def forward_begin(self, stage: int, m: int, x: Streams) -> None:
        self.note("F", stage, m)

    def backward_end(self, stage: int, m: int, x: Streams, dx: Streams) -> None:
        self.note("B", stage, m)

    def drift(self, stage: int, microbatches: range) -> float:
        pairs = [(self.found["F", stage, m], self.found["B", stage, m]) for m in microbatches]
        return sum(float((b - f).norm() / f.norm()) for f, b in pairs) / len(pairs)


@pytest.mark.parametrize("method", ["petra", "delayed"])
def test_drift_is_that_of_all_weights(method: str) -> None:
    pipeline = built(method)
    drift = WeightDrift(pipeline, every=3)
    pipeline.measures.append(drift.metrics)
    assert [isnan(drift.metrics()[f"stage/{j}/weight_drift"]) for j in (1, 2, 3)] == [True, True, False], "stage 3 is not stale"
    with pipeline.hooks.attached(Copies(pipeline)) as copies, pipeline.hooks.attached(drift):
        pipeline.train(RandomSource(), 16)
    rows = pipeline.stage_metrics()
    for j in (0, 1):
        assert rows[f"stage/{j + 1}/weight_drift"] == pytest.approx(copies.drift(j, range(2, 16, 3)), rel=1e-12)
        assert rows[f"stage/{j + 1}/weight_drift"] > 1e-3
    assert [rows[f"stage/{j}/staleness"] for j in (1, 2, 3)] == [2.0, 1.0, 0.0]
    assert rows["stage/3/weight_drift"] == 0
    assert drift.metrics() == {key: value for key, value in rows.items() if key in drift.metrics()}  # nothing measured since


def test_every_place_in_an_update_is_measured() -> None:
    """With τ < k, an update lies between F and B of some microbatches only: measuring the last of each update would find none."""
    for k in range(1, 65):
        assert {distance(k, 10) * i % k for i in range(k)} == set(range(k))
    pipeline = built(k=8)
    assert pipeline.plan.stages[0].staleness == 0.5
    drift = WeightDrift(pipeline, distance(8, 1))
    with pipeline.hooks.attached(Copies(pipeline)) as copies, pipeline.hooks.attached(drift):
        pipeline.train(RandomSource(), 8 * 13)
    found, exact = drift.metrics()["stage/1/weight_drift"], copies.drift(0, range(8 * 13))
    assert found == pytest.approx(exact, rel=0.2)
    assert copies.drift(0, range(7, 8 * 13, 8)) == 0


def test_an_interval_is_a_number_of_microbatches() -> None:
    with pytest.raises(ConfigError, match="every: expected an integer >= 1, got 0"):
        WeightDrift(built(), every=0)
