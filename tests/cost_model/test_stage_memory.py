"""Memory of the stages of a long pipeline, from short ones, against the account of the long pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from petra import METHODS, Method, Model, TensorSpec
from petra.cost_model import stage_memory
from petra.cost_model.block_memory import Known, Pass
from petra.cost_model.memory import predict_memory
from petra.cost_model.stage_memory import predict_stages
from petra.engine.endpoints import Losses
from petra.engine.metrics import correct_predictions
from petra.engine.recipe import Recipe
from petra.method import Weights
from petra.models import MODELS
from petra.plan import make_plan
from petra.settings import Numerics
from petra.training import OPTIMIZERS

LOSSES = Losses(F.cross_entropy, F.cross_entropy)
RECIPE = Recipe(OPTIMIZERS["sgd"], lambda m: 0.1, LOSSES, {"accuracy": correct_predictions})


def transformer(depth: int) -> tuple[Model, TensorSpec, TensorSpec]:
    model = MODELS["revgpt"](64, dim=64, depth=depth, heads=2, size=32)
    return model, TensorSpec((8, 32), torch.int64), TensorSpec((8 * 32,), torch.int64)


def images() -> tuple[Model, TensorSpec, TensorSpec]:
    model = MODELS["revnet18"](5, width=0.25)
    return model, TensorSpec((8, 3, 32, 32), torch.float32), TensorSpec((8,), torch.int64)


FLAGS = 1024
"""Bytes that a backward leaves until the update: a sum of each stream's gradient."""
UNEQUAL = {"d = 3, 0, 1": (3, 0, 1, 2, 2, 1, 2)}
"""Delays of the boundaries."""


@pytest.mark.parametrize("method", ["petra", "pipedream_2bw", "1f1b", *UNEQUAL])
def test_short_pipelines_tell_the_memory_of_a_long_one(method: str) -> None:
    model, inputs, targets = transformer(6)
    chosen = METHODS[method] if method in METHODS else Method("x", UNEQUAL[method], METHODS["petra"].keep)
    k = 8
    plan = make_plan(model, inputs, method=chosen, k=k, processes=8, device_type="cuda")
    known = Known()
    for j, found in enumerate(predict_stages(plan, RECIPE, targets, known)):
        expected = predict_memory(plan, RECIPE, targets, process=j, known=known)
        version = expected.gradients if plan.stages[j].weights is Weights.STASHED else 0  # a drain may have used one more or less
        assert found.stored == expected.stored
        assert found.temporary == pytest.approx(expected.temporary, abs=FLAGS * k + version)
        assert found.tensors == pytest.approx(expected.tensors, rel=0.05)


def test_stages_of_a_convolutional_network() -> None:
    method, k = "delayed", 3
    model, inputs, targets = images()
    plan = make_plan(model, inputs, method=method, k=k, processes=10, device_type="cuda", refetch=True)
    known = Known()
    found = predict_stages(plan, RECIPE, targets, known)
    for j in (0, 1, 3, 8, 9):
        expected = predict_memory(plan, RECIPE, targets, process=j, known=known)
        assert found[j].stored == expected.stored
        assert found[j].temporary == pytest.approx(expected.temporary, abs=FLAGS * k)
        assert found[j].tensors == pytest.approx(expected.tensors, rel=0.02)


def test_equal_stages_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    account = stage_memory.account
    monkeypatch.setattr(stage_memory, "account", lambda plan, *rest, **more: counted.append(plan) or account(plan, *rest, **more))
    model, inputs, targets = transformer(38)
    plan = make_plan(model, inputs, k=8, processes=40, device_type="cuda")
    found = predict_stages(plan, RECIPE, targets, Known())
    assert len(counted) <= 7
    assert max(len(plan.stages) for plan in counted) <= 6
    assert len({stage.stored for stage in found[2:30]}) == 1  # a reversible stage stores nothing for the microbatches in flight


@pytest.mark.parametrize(
    ("method", "make", "autocast"),
    [
        ("petra", images, None),
        ("reconstruct_stashed", transformer, torch.bfloat16),
    ],
)
def test_blocks_of_a_kind_run_once(
    method: str, make: Callable[..., tuple[Model, TensorSpec, TensorSpec]], autocast: torch.dtype | None
) -> None:
    """The account is the same, up to a rounding of casts of small weights."""
    model, inputs, targets = make(3) if make is transformer else make()
    plan = make_plan(model, inputs, method=method, k=5, stages=3, processes=3, device_type="cuda", numerics=Numerics(autocast))
    known = Known()
    for process in (2, 0):
        whole = predict_memory(plan, RECIPE, targets, process=process)
        found = predict_memory(plan, RECIPE, targets, process=process, known=known)
        assert replace(found, temporary=0, stages={}) == replace(whole, temporary=0, stages={})
        assert found.temporary == pytest.approx(whole.temporary, abs=2 * FLAGS)


def test_a_deep_model_takes_no_more_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    run = Pass.of
    monkeypatch.setattr(Pass, "of", lambda *rest: counted.append(1) or run(*rest))
    passes = []
    for depth in (8, 40):
        counted.clear()
        model, inputs, targets = transformer(depth)
        known = Known()
        for method in ("petra", "1f1b"):
            plan = make_plan(model, inputs, method=method, k=4, stages=4, processes=4, device_type="cuda")
            predict_stages(plan, RECIPE, targets, known)
        passes.append(len(counted))
    assert passes[0] == passes[1] < 60
