"""Predicted memory of a GPU against the peak of the emulated device's allocator."""

from __future__ import annotations

import gc

import pytest
import torch

from petra import TensorSpec
from petra.cost_model.memory import PredictedMemory, predict_memory
from tests.emulated.core import core
from tests.emulated.processes import run
from tests.emulated.runs import Case

pytestmark = pytest.mark.emulated


def specification(case: Case) -> TensorSpec:
    """Return shape and type of the targets of a microbatch."""
    targets = case.source().targets(0)
    return TensorSpec(tuple(targets.shape), targets.dtype)


def measured_and_predicted(rank: int, case: Case, device: str) -> tuple[int, PredictedMemory]:
    """Train, and return the peak of the allocator and the prediction for this process."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    pipeline = case.pipeline(device)
    pipeline.train(case.source(), case.microbatches)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return peak, predict_memory(pipeline.plan, pipeline.recipe, specification(case), process=rank)


def alone(case: Case) -> tuple[int, PredictedMemory]:
    return measured_and_predicted(0, case, "cuda:0")


def among_others(rank: int, case: Case) -> tuple[int, PredictedMemory]:
    return measured_and_predicted(rank, case, f"cuda:{rank}")


CASES = [
    Case(net="revnet18", microbatches=26),  # more than the largest delay, 18
    Case(net="revnet18", microbatches=26, optimizer="adamw", numerics={"channels_last": True}),
    Case("backprop", net="resnet18"),
    Case("1f1b", net="revnet18", k=4, microbatches=16),
    Case(net="revgpt", microbatches=16, optimizer="adamw"),
]


@pytest.mark.parametrize("case", core(CASES, {1}), ids=str)
def test_the_peak_of_one_process_is_predicted(case: Case) -> None:
    peak, predicted = run(alone, case)[0]
    assert predicted.tensors == pytest.approx(peak, rel=0.05)
    assert len(predicted.stages) > 1


@pytest.mark.parametrize("case", core([CASES[0], CASES[3]], {1}), ids=str)
def test_the_peak_of_each_of_several_processes_is_predicted(case: Case) -> None:
    for peak, predicted in run(among_others, case, world=3):
        assert predicted.tensors == pytest.approx(peak, rel=0.05), predicted
