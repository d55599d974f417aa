"""Gradient quality during training: against plain autograd, in cases with known results, and without changing a bit."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from petra import ConfigError, Keep, Method, Pipeline, UpdateRules, Weights
from petra.diagnostics.gradient_quality import GradientQuality
from petra.diagnostics.reconstruction_error import ReconstructionMonitor
from petra.diagnostics.recorder import Recorder, StageTimes
from petra.diagnostics.weight_drift import WeightDrift
from petra.hooks import Gradients, Hook
from tests.support.nets import RandomSource, assert_equal, hook, mixed, mixed_net
from tests.support.remedies import Remedy

PETRA = Method("petra", 2, Keep.NOTHING)
DELAYED = Method("delayed", 2, Keep.INPUT, Weights.STASHED)


def sgd(lr: float = 0.05) -> Callable[[nn.Module], torch.optim.SGD]:
    return lambda module: torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)


def rows_of(
    method: Method, every: int, *, lr: float = 0.05, microbatches: int = 17, dropout: float = 0.2, k: int = 2
) -> list[dict[str, float]]:
    pipeline, rows = mixed(dropout, method=method, k=k, optimizer=sgd(lr), seed=5), list[dict[str, float]]()
    with pipeline.hooks.attached(GradientQuality(pipeline, every, rows.append)):
        pipeline.train(RandomSource(), microbatches)
    return rows


GRAPH = Method("graph", 1, Keep.GRAPH)
ATTACHED: dict[str, Callable[[Pipeline], Hook]] = {
    "gradient quality": lambda pipeline: GradientQuality(pipeline, 3, [].append),
    "reconstruction errors": lambda pipeline: ReconstructionMonitor(pipeline, 100.0),
    "intervals": Recorder,
    "times": StageTimes,
    "weight drift": lambda pipeline: WeightDrift(pipeline, 3),
}


@pytest.mark.parametrize(("name", "method"), [*zip(ATTACHED, cycle([PETRA, DELAYED]), strict=False), ("gradient quality", GRAPH)])
def test_diagnostics_do_not_change_training(name: str, method: Method) -> None:
    plain, observed = (mixed(0.2, method=method, k=2, seed=5) for _ in range(2))
    plain.train(RandomSource(), 17)
    with observed.hooks.attached(ATTACHED[name](observed)):
        observed.train(RandomSource(), 17)
    assert_equal(observed.state_dict(), plain.state_dict())


@pytest.mark.parametrize("method", [PETRA, DELAYED, Method("backprop", 0, Keep.GRAPH)], ids=lambda m: m.name)
def test_all_gradients_are_equal_with_frozen_weights(method: Method) -> None:
    for row in rows_of(method, 4, lr=0.0):
        for other in ("end_to_end", "delayed"):
            assert row[f"cosine_{other}"] == pytest.approx(1, abs=1e-12)
            assert row[f"norm_ratio_{other}"] == pytest.approx(1, abs=1e-9)
        assert row["angle_stored"] < 1e-5
        assert row["reconstruction_error"] < 1e-12


def test_end_to_end_gradient_is_plain_autograd() -> None:
    """With d = 0 and k = 3 the pipeline's own gradient is the end-to-end one, also while weights change."""
    rows = rows_of(Method("reversible", 0, Keep.NOTHING), 1, microbatches=7, k=3, dropout=0.0)
    assert all(row["cosine_end_to_end"] == pytest.approx(1, abs=1e-12) for row in rows)
    pipeline = mixed(method=PETRA, optimizer=sgd(0.0), seed=5)
    rows.clear()
    quality, gradients = GradientQuality(pipeline, 1, rows.append), dict[int, Gradients]()
    note = hook(block_backward_end=lambda stage, block, m, x, found: gradients.update({stage: found}))
    with pipeline.hooks.attached(quality), pipeline.hooks.attached(note):
        pipeline.train(RandomSource(), 1)
    assert all(row["cosine_end_to_end"] == pytest.approx(1, abs=1e-12) for row in rows)
    assert all(row["norm_ratio_end_to_end"] == pytest.approx(1, abs=1e-9) for row in rows)
    plain = mixed_net().build(5)
    F.cross_entropy(plain(RandomSource().inputs(0)), RandomSource().targets(0)).backward()
    for j, block in enumerate(plain.children()):
        for p, own in zip(block.parameters(), pipeline.stages[j].module.parameters(), strict=True):
            torch.testing.assert_close(gradients[j][own], p.grad, rtol=1e-9, atol=1e-11)


def test_invalid_settings() -> None:
    pipeline = mixed()
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
    made, rows = mixed(method=method, optimizer=sgd(), **settings), list[dict[str, float]]()
    with made.hooks.attached(GradientQuality(made, 3, rows.append)):
        made.train(RandomSource(), 13)
    assert rows
    for row in rows:
        assert row["angle_stored"] < 1e-5
        if made.plan.method.weights is not Weights.CURRENT:
            assert (row["cosine_delayed"], row["norm_ratio_delayed"]) == pytest.approx((1, 1), abs=1e-9)
