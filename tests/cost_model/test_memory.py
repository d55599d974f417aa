"""Memory that a GPU will reach, against sizes counted by hand. tests/emulated/test_memory.py compares peaks of an allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import fake_tensor

from petra import METHODS, TensorSpec, UpdateRules
from petra.cost_model.memory import PredictedMemory, predict_memory
from petra.diagnostics.activation_memory import BLOCK
from petra.engine.recipe import Recipe
from petra.plan import make_plan
from petra.training import OPTIMIZERS
from tests.support.nets import mixed_net

INPUTS, TARGETS = TensorSpec((4, 3, 8, 8), torch.float32), TensorSpec((4,), torch.int64)


def predicted(
    optimizer: str = "sgd",
    *,
    delay: int = 2,
    processes: int = 1,
    process: int = 0,
    average: float | None = None,
    refetch: bool = False,
) -> PredictedMemory:

    method = replace(METHODS["petra"], delay=delay)
    plan = make_plan(
        mixed_net(dtype=torch.float32),
        INPUTS,
        method=method,
        k=2,
        processes=processes,
        device_type="cuda",
        refetch=refetch,
    )
    recipe = Recipe(
        OPTIMIZERS[optimizer],
        lambda m: 0.1,
        rules=UpdateRules(average=average),
    )
    return predict_memory(plan, recipe, TARGETS, process=process)


def rounded(sizes: list[int]) -> int:
    return sum(-(-size // BLOCK) * BLOCK for size in sizes)


def test_weights_gradients_and_states_are_those_of_the_parameters() -> None:
    modules = [block.build() for block in mixed_net(dtype=torch.float32).blocks]
    parameters = [p.nbytes for module in modules for p in module.parameters()]
    buffers = [b.nbytes for module in modules for b in module.buffers()]
    sgd, adam, averaged = predicted(), predicted("adamw"), predicted(average=0.9)
    assert sgd.weights == rounded(parameters + buffers)
    assert sgd.gradients == sgd.optimizer == rounded(parameters)
    assert adam.optimizer == 2 * rounded(parameters) + BLOCK * len(parameters)  # a number of steps for each parameter
    assert averaged.optimizer == 2 * sgd.optimizer


@pytest.mark.parametrize(("processes", "process"), [(1, 0), (3, 1), (6, 3)])
def test_stages_add_up_to_their_process(processes: int, process: int) -> None:
    owned = [predicted(processes=processes, process=p).stages for p in range(processes)]
    assert sorted(stage for stages in owned for stage in stages) == list(range(6))
    whole = predicted(processes=processes, process=process)
    for part in ("weights", "gradients", "optimizer", "stored"):
        assert sum(getattr(stage, part) for stage in whole.stages.values()) == getattr(whole, part)
    assert max(stage.temporary for stage in whole.stages.values()) == whole.temporary
    assert all(stage.total == stage.tensors > 0 for stage in whole.stages.values())


def test_a_stage_that_fetches_its_input_again_does_not_store_it() -> None:
    """The last microbatch in flight is the input of the forward that has just ended."""
    stored, refetched = (predicted(processes=6, refetch=refetch) for refetch in (False, True))
    assert stored.stored - refetched.stored == 10 * INPUTS.bytes


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_nothing_is_allocated(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FakeTensorMode runs kernels that it doesn't know on real tensors; those of fused optimizers would need all weights."""
    fallbacks = []
    kernel = fake_tensor.run_fallback_kernel
    monkeypatch.setattr(fake_tensor, "run_fallback_kernel", lambda mode, op, *rest: fallbacks.append(op) or kernel(mode, op, *rest))
    predicted(optimizer)
    assert fallbacks == []
