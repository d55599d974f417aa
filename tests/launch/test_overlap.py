"""Overlap, streams and graphs in configurations, in the plan of machines, and in the first line of a run."""

from __future__ import annotations

import pytest

from launch.plan import predict_method
from launch.run.records import headline
from petra import METHODS, ConfigError
from petra.cost_model.autotune import BlockCost
from petra.cost_model.links import Link
from petra.cost_model.machines import Machines
from petra.engine.options.overlap import describe_overlap
from tests.launch.test_launch import planned


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer.overlap=true", "method=1f1b"), r"trainer\.overlap: expected false unless a boundary .* d >= 2, got true with"),
        (("trainer.overlap=true", "trainer.exact_streams=true"), r"trainer\.exact_streams: expected false with trainer\.overlap"),
    ],
)
def test_settings_that_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(*overrides)


def test_the_first_line_names_the_stages_that_overlap() -> None:
    assert "; forward beside backward at stages 1–9 of 10" in headline(planned("trainer.overlap=true"))
    assert "beside" not in headline(planned())


def test_the_plan_says_which_stages_overlap() -> None:
    assert describe_overlap((2, 2, 2)) == "forward beside backward at stages 1–3 of 4"
    assert describe_overlap((1, 2, 1, 3)) == "forward beside backward at stages 2, 4 of 5"
    assert describe_overlap((1,)) == "no stage of 2 overlaps"


def test_the_plan_of_machines_knows_overlap() -> None:
    blocks = [BlockCost(f"b{i}", True, 1.0, 3.0, 1.0, 2.0, 0.0, 8, 8, 8, 4) for i in range(4)]
    machines = Machines.equal(4, Link(1e12, 0.0), float("inf"))
    turns, beside = (
        predict_method(blocks, METHODS["petra"], 2, machines, "auto", overlap=overlap).prediction.period
        for overlap in (False, True)
    )
    assert turns == pytest.approx(4)
    assert beside == pytest.approx(4)  # the last block is reversible, so the last stage needs F + B = 4 in turn
    last = [*blocks[:3], BlockCost("head", False, 1.0, 3.0, 1.0, 2.0, 0.0, 8, 8, 8, 4)]
    assert predict_method(last, METHODS["petra"], 2, machines, "auto", overlap=True).prediction.period == pytest.approx(3)
