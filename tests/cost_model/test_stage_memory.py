"""Memory of the stages of a long pipeline, from short ones, against the account of the long pipeline."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from petra import METHODS, Method, Model, TensorSpec, UpdateRules
from petra.cost_model import stage_memory
from petra.cost_model.memory import predict_memory
from petra.cost_model.stage_memory import predict_stages
from petra.engine.build import Recipe
from petra.engine.endpoints import Losses
from petra.engine.metrics import correct_predictions
from petra.models import MODELS
from petra.plan import make_plan
from petra.staleness import Remedy
from petra.training import OPTIMIZERS

LOSSES = Losses(F.cross_entropy, F.cross_entropy)
RECIPE = Recipe(OPTIMIZERS["sgd"], lambda m: 0.1, LOSSES, {"accuracy": correct_predictions}, 0, UpdateRules(), Remedy())


def transformer(depth: int) -> tuple[Model, TensorSpec, TensorSpec]:
    model = MODELS["revgpt"](64, dim=64, depth=depth, heads=2, size=32)
    return model, TensorSpec((8, 32), torch.int64), TensorSpec((8 * 32,), torch.int64)


def images() -> tuple[Model, TensorSpec, TensorSpec]:
    model = MODELS["revnet18"](5, width=0.25)
    return model, TensorSpec((8, 3, 32, 32), torch.float32), TensorSpec((8,), torch.int64)


UNEQUAL = {"d = 3, 0, 1": (3, 0, 1, 2, 2, 1, 2), "d = 4, 3": (4, 3, 3, 3, 3, 3, 3)}
"""Delays of the boundaries."""


@pytest.mark.parametrize("method", [*METHODS, *UNEQUAL])
def test_short_pipelines_tell_the_memory_of_a_long_one(method: str) -> None:
    """Up to the flags of a few bytes that each backward leaves until the update."""
    model, inputs, targets = transformer(6)
    chosen = METHODS[method] if method in METHODS else Method("x", UNEQUAL[method], METHODS["petra"].keep)
    k = 16 if method == "paci" else 8
    plan = make_plan(model, inputs, method=chosen, k=k, processes=8, device_type="cuda")
    for j, found in enumerate(predict_stages(plan, RECIPE, targets)):
        expected = predict_memory(plan, RECIPE, targets, process=j)
        assert found.stored == pytest.approx(expected.stored, abs=1024 * k)
        assert found.tensors == pytest.approx(expected.tensors, rel=0.05)


@pytest.mark.parametrize(("method", "k"), [("petra", 1), ("delayed", 3), ("1f1b", 20), ("zb_h1", 12)])
def test_stages_of_a_convolutional_network(method: str, k: int) -> None:
    model, inputs, targets = images()
    plan = make_plan(model, inputs, method=method, k=k, processes=10, device_type="cuda", refetch=True)
    found = predict_stages(plan, RECIPE, targets)
    for j in (0, 1, 3, 8, 9):
        assert found[j].tensors == pytest.approx(predict_memory(plan, RECIPE, targets, process=j).tensors, rel=0.02)


def test_equal_stages_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    account = stage_memory.account
    monkeypatch.setattr(stage_memory, "account", lambda plan, *rest, **more: counted.append(plan) or account(plan, *rest, **more))
    model, inputs, targets = transformer(98)
    plan = make_plan(model, inputs, k=8, processes=100, device_type="cuda")
    found = predict_stages(plan, RECIPE, targets)
    assert len(counted) <= 7
    assert max(len(plan.stages) for plan in counted) <= 6
    assert len({stage.stored for stage in found[2:90]}) == 1  # a reversible stage stores nothing for the microbatches in flight
