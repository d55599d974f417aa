"""Gradient quality during training, against plain autograd and closed cases, and that watching changes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from petra import ConfigError, Keep, Method, Pipeline, UpdateRules, Weights
from petra.analysis.plots import gradient_quality
from petra.diagnostics.gradient_quality import GradientDiagnosis, angle
from petra.staleness import Prediction, Remedy
from tests.support.nets import RandomStream, mixed_net

PETRA = Method("petra", 2, Keep.NOTHING)
DELAYED = Method("delayed", 2, Keep.INPUT, Weights.STASHED)


def sgd(lr: float = 0.05, momentum: float = 0.9):  # type: ignore[no-untyped-def]
    return lambda module: torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)


def trained(method: Method, every: int | None, *, lr: float = 0.05, microbatches: int = 17, dropout: float = 0.2, k: int = 2):  # type: ignore[no-untyped-def]
    pipeline = Pipeline(mixed_net(dropout=dropout), RandomStream().spec, method=method, k=k, optimizer=sgd(lr), seed=5)
    if every is None:
        pipeline.train(RandomStream(), microbatches)
        return pipeline, []
    diagnosis = GradientDiagnosis(pipeline, every)
    with diagnosis.watching():
        pipeline.train(RandomStream(), microbatches)
    return pipeline, diagnosis.rows


@pytest.mark.parametrize("method", [PETRA, DELAYED, Method("graph", 1, Keep.GRAPH)], ids=lambda m: m.name)
def test_watching_changes_no_bit(method: Method) -> None:
    plain, _ = trained(method, None)
    watched, rows = trained(method, 3)
    assert len(rows) == 6 * 6
    for key, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[key]), key
    assert not any("forward" in vars(s) or "backward" in vars(s) for s in watched.stages.values())


@pytest.mark.parametrize("method", [PETRA, DELAYED, Method("backprop", 0, Keep.GRAPH)], ids=lambda m: m.name)
def test_with_frozen_weights_all_gradients_are_one(method: Method) -> None:
    for row in trained(method, 4, lr=0.0)[1]:
        for other in ("end_to_end", "delayed"):
            assert row[f"cosine_{other}"] == pytest.approx(1, abs=1e-12)
            assert row[f"norm_ratio_{other}"] == pytest.approx(1, abs=1e-9)
        assert row["angle_stored"] < 1e-5
        assert row["reconstruction_error"] < 1e-12


def test_the_delayed_method_is_the_delayed_gradient() -> None:
    rows = trained(DELAYED, 4)[1]
    assert all(row["cosine_delayed"] == pytest.approx(1, abs=1e-12) for row in rows)
    assert all(row["norm_ratio_delayed"] == pytest.approx(1, abs=1e-9) for row in rows)
    assert min(row["cosine_end_to_end"] for row in rows) < 0.999
    assert all(row["cosine_end_to_end"] == pytest.approx(row["cosine_delayed_end_to_end"]) for row in rows)


def test_staleness_shows_where_it_is() -> None:
    """The last stage's gradient is fresh but for the input it gets; the first stage's is not, and only what reconstructs errs."""
    rows = [row for row in trained(PETRA, 4, lr=0.2)[1] if row["microbatch"] == 12]
    assert {row["stage"] for row in rows} == {1, 2, 3, 4, 5, 6}
    by_stage = {row["stage"]: row for row in rows}
    assert by_stage[6]["angle_stored"] < 1e-5
    assert by_stage[6]["reconstruction_error"] == by_stage[3]["reconstruction_error"] == by_stage[1]["reconstruction_error"] == 0
    assert by_stage[2]["reconstruction_error"] > 1e-6
    assert by_stage[4]["angle_stored"] > 1e-4  # two functions: the second one's error reaches the first
    assert by_stage[1]["cosine_end_to_end"] < 1 - 1e-6


def test_end_to_end_is_plain_autograd() -> None:
    """d = 0, k = 3: the pipeline's own gradient is the end-to-end one, also as its weights move; and plain PyTorch's."""
    rows = trained(Method("reversible", 0, Keep.NOTHING), 1, microbatches=7, k=3, dropout=0.0)[1]
    assert all(row["cosine_end_to_end"] == pytest.approx(1, abs=1e-12) for row in rows)
    pipeline = Pipeline(mixed_net(), RandomStream().spec, method=PETRA, optimizer=sgd(0.0), seed=5)
    diagnosis = GradientDiagnosis(pipeline, 1)
    seen: list[torch.Tensor] = []
    compare = diagnosis._compare
    diagnosis._compare = lambda m, j, *rest: seen.append(diagnosis._cases[m].end_to_end[j]) or compare(m, j, *rest)  # type: ignore[method-assign, func-returns-value]
    with diagnosis.watching():
        pipeline.train(RandomStream(), 1)
    plain = mixed_net().build(5)
    F.cross_entropy(plain(RandomStream().inputs(0)), RandomStream().targets(0)).backward()
    expected = [torch.cat([p.grad.flatten() for p in block.parameters()]) for block in plain.children()]  # type: ignore[union-attr]
    for found, reference in zip(reversed(seen), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-11)


def test_small_angles() -> None:
    a = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for radians in (1e-9, 1e-3, 1.0, 3.0):
        b = torch.tensor([math.cos(radians), math.sin(radians)], dtype=torch.float64)
        assert angle(a, 5 * b) == pytest.approx(radians, rel=1e-6)


def test_rows_are_written_and_drawn(tmp_path: Path) -> None:
    pipeline = Pipeline(mixed_net(), RandomStream().spec, method=PETRA, optimizer=sgd(), stages=2)
    diagnosis = GradientDiagnosis(pipeline, 2, tmp_path / "gradients.jsonl")
    with diagnosis.watching():
        pipeline.train(RandomStream(), 4)
    rows = [json.loads(line) for line in (tmp_path / "gradients.jsonl").read_text().splitlines()]
    assert [(row["microbatch"], row["stage"]) for row in rows] == [(0, 2), (0, 1), (2, 2), (2, 1)]
    assert rows == diagnosis.rows
    gradient_quality(rows, tmp_path / "gradients.png")
    assert (tmp_path / "gradients.png").read_bytes().startswith(b"\x89PNG")


def test_settings_that_are_refused() -> None:
    pipeline = Pipeline(mixed_net(), RandomStream().spec, optimizer=sgd())
    with pytest.raises(ConfigError, match=r"trainer\.diagnose: found 0"):
        GradientDiagnosis(pipeline, 0)
    pipeline.world = 2
    with pytest.raises(ConfigError, match=r"trainer\.diagnose: found 5 in 2 processes, accepted is null"):
        GradientDiagnosis(pipeline, 5)


def test_a_stage_without_parameters_has_no_gradient_to_compare() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    from petra import BlockSpec, Model

    model = Model(
        "m", (BlockSpec("doubled", Doubled), BlockSpec("flat", nn.Flatten), BlockSpec("linear", lambda: nn.Linear(192, 5).double()))
    )
    pipeline = Pipeline(model, RandomStream().spec, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    diagnosis = GradientDiagnosis(pipeline, 1)
    with diagnosis.watching():
        pipeline.train(RandomStream(), 1)
    assert ["cosine_delayed" in row for row in diagnosis.rows] == [True, False, False]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("pipedream_2bw", {"k": 6}),
        (DELAYED, {"remedy": Remedy(prediction=Prediction.VELOCITY)}),
        (Method("dsp", 2, Keep.INPUT), {"remedy": Remedy(correction=0.1)}),
        (DELAYED, {"rules": UpdateRules(loss_scale=8.0)}),
    ],
    ids=["double", "predicted", "corrected", "scaled"],
)
def test_references_use_the_weights_that_the_method_uses(method: str | Method, settings: dict[str, Any]) -> None:
    """Where inputs are kept, the stored gradient is the method's own; where B takes F's weights, so is the delayed one."""
    made = Pipeline(mixed_net(), RandomStream().spec, method=method, optimizer=sgd(), **settings)
    diagnosis = GradientDiagnosis(made, 3)
    with diagnosis.watching():
        made.train(RandomStream(), 13)
    for row in diagnosis.rows:
        assert row["angle_stored"] < 1e-5
        if made.method.weights is not Weights.CURRENT:
            assert row["norm_ratio_delayed"] == pytest.approx(1, abs=1e-9)
