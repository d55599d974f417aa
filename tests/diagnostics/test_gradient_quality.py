"""Gradient quality during training: against plain autograd, in cases with known results, and without changing a bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from petra import ConfigError, Keep, Method, UpdateRules, Weights
from petra.diagnostics.gradient_quality import GradientQuality, angle
from petra.hooks import Gradients, Hook
from petra.specs import Streams
from tests.support.nets import RandomSource, make_pipeline, mixed_net
from tests.support.remedies import Remedy

PETRA = Method("petra", 2, Keep.NOTHING)
DELAYED = Method("delayed", 2, Keep.INPUT, Weights.STASHED)


def sgd(lr: float = 0.05, momentum: float = 0.9):  # type: ignore[no-untyped-def]
    return lambda module: torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)


def trained(method: Method, every: int | None, *, lr: float = 0.05, microbatches: int = 17, dropout: float = 0.2, k: int = 2):  # type: ignore[no-untyped-def]
    pipeline = make_pipeline(mixed_net(dropout=dropout), RandomSource().spec, method=method, k=k, optimizer=sgd(lr), seed=5)
    if every is None:
        pipeline.train(RandomSource(), microbatches)
        return pipeline, []
    rows: list[dict[str, float]] = []
    with pipeline.hooks.attached(GradientQuality(pipeline, every, rows.append)):
        pipeline.train(RandomSource(), microbatches)
    return pipeline, rows


@pytest.mark.parametrize("method", [PETRA, DELAYED, Method("graph", 1, Keep.GRAPH)], ids=lambda m: m.name)
def test_training_is_unchanged(method: Method) -> None:
    plain, _ = trained(method, None)
    observed, rows = trained(method, 3)
    assert len(rows) == 6 * 6
    for key, value in plain.state_dict().items():
        assert torch.equal(value, observed.state_dict()[key]), key


@pytest.mark.parametrize("method", [PETRA, DELAYED, Method("backprop", 0, Keep.GRAPH)], ids=lambda m: m.name)
def test_all_gradients_are_equal_with_frozen_weights(method: Method) -> None:
    for row in trained(method, 4, lr=0.0)[1]:
        for other in ("end_to_end", "delayed"):
            assert row[f"cosine_{other}"] == pytest.approx(1, abs=1e-12)
            assert row[f"norm_ratio_{other}"] == pytest.approx(1, abs=1e-9)
        assert row["angle_stored"] < 1e-5
        assert row["reconstruction_error"] < 1e-12


def test_delayed_method_has_the_delayed_gradient() -> None:
    rows = trained(DELAYED, 4)[1]
    assert all(row["cosine_delayed"] == pytest.approx(1, abs=1e-12) for row in rows)
    assert all(row["norm_ratio_delayed"] == pytest.approx(1, abs=1e-9) for row in rows)
    assert min(row["cosine_end_to_end"] for row in rows) < 0.999
    assert all(row["cosine_end_to_end"] == pytest.approx(row["cosine_delayed_end_to_end"]) for row in rows)


def test_errors_of_each_stage() -> None:
    """The last stage's gradient has no staleness, the first stage's has the most; only reconstructing stages have input errors."""
    rows = [row for row in trained(PETRA, 4, lr=0.2)[1] if row["microbatch"] == 12]
    assert {row["stage"] for row in rows} == {1, 2, 3, 4, 5, 6}
    by_stage = {row["stage"]: row for row in rows}
    assert by_stage[6]["angle_stored"] < 1e-5
    assert by_stage[6]["reconstruction_error"] == by_stage[3]["reconstruction_error"] == by_stage[1]["reconstruction_error"] == 0
    assert by_stage[2]["reconstruction_error"] > 1e-6
    assert by_stage[4]["angle_stored"] > 1e-4  # Two functions: the error of the second reaches the first.
    assert by_stage[1]["cosine_end_to_end"] < 1 - 1e-6


def test_end_to_end_gradient_is_plain_autograd() -> None:
    """With d = 0 and k = 3 the pipeline's own gradient is the end-to-end one, also while weights change."""
    rows = trained(Method("reversible", 0, Keep.NOTHING), 1, microbatches=7, k=3, dropout=0.0)[1]
    assert all(row["cosine_end_to_end"] == pytest.approx(1, abs=1e-12) for row in rows)
    pipeline = make_pipeline(mixed_net(), RandomSource().spec, method=PETRA, optimizer=sgd(0.0), seed=5)
    rows.clear()
    quality, gradients = GradientQuality(pipeline, 1, rows.append), GradientsOfFirst()
    with pipeline.hooks.attached(quality), pipeline.hooks.attached(gradients):
        pipeline.train(RandomSource(), 1)
    assert all(row["cosine_end_to_end"] == pytest.approx(1, abs=1e-12) for row in rows)
    assert all(row["norm_ratio_end_to_end"] == pytest.approx(1, abs=1e-9) for row in rows)
    plain = mixed_net().build(5)
    F.cross_entropy(plain(RandomSource().inputs(0)), RandomSource().targets(0)).backward()
    for j, block in enumerate(plain.children()):
        for p, own in zip(block.parameters(), pipeline.stages[j].module.parameters(), strict=True):
            torch.testing.assert_close(gradients.stages[j][own], p.grad, rtol=1e-9, atol=1e-11)


class GradientsOfFirst(Hook):
    """Gradients of the first microbatch, by stage."""

    def __init__(self) -> None:
        self.stages: dict[int, Gradients] = {}

    def block_backward_end(self, stage: int, block: int, m: int, x: Streams, gradients: Gradients) -> None:
        if m == 0:
            self.stages[stage] = gradients


def test_small_angles() -> None:
    a = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for radians in (1e-9, 1e-3, 1.0, 3.0):
        b = torch.tensor([math.cos(radians), math.sin(radians)], dtype=torch.float64)
        assert angle(a, 5 * b) == pytest.approx(radians, rel=1e-6)


def test_invalid_settings() -> None:
    pipeline = make_pipeline(mixed_net(), RandomSource().spec, optimizer=sgd())
    with pytest.raises(ConfigError, match=r"trainer\.diagnose: expected null or an integer >= 1, got 0"):
        GradientQuality(pipeline, 0, print)
    pipeline.world = 2
    with pytest.raises(ConfigError, match=r"trainer\.diagnose: expected null in several processes, got 5 in 2 processes"):
        GradientQuality(pipeline, 5, print)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("pipedream_2bw", {"k": 6}),
        (DELAYED, {"remedy": Remedy(prediction="velocity")}),
        (Method("dsp", 2, Keep.INPUT), {"remedy": Remedy(correction=0.1)}),
        (DELAYED, {"rules": UpdateRules(loss_scale=8.0)}),
    ],
    ids=["double", "predicted", "corrected", "scaled"],
)
def test_references_use_the_weights_that_the_method_uses(method: str | Method, settings: dict[str, Any]) -> None:
    """With stored inputs the *stored* reference is the method's own gradient, and with stashed weights so is *delayed*."""
    made = make_pipeline(mixed_net(), RandomSource().spec, method=method, optimizer=sgd(), **settings)
    rows: list[dict[str, float]] = []
    with made.hooks.attached(GradientQuality(made, 3, rows.append)):
        made.train(RandomSource(), 13)
    assert rows
    for row in rows:
        assert row["angle_stored"] < 1e-5
        if made.plan.method.weights is not Weights.CURRENT:
            assert row["norm_ratio_delayed"] == pytest.approx(1, abs=1e-9)
