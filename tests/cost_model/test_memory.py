"""Memory that a GPU will reach, against sizes counted by hand, and against the bytes that live while the engine trains."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor

from petra import BlockSpec, ConfigError, Keep, Method, Model, Numerics, Pipeline, TensorSpec, UpdateRules
from petra.cost_model.memory import PredictedMemory, predict_memory
from petra.cost_model.stage_memory import Known, LiveBytes
from petra.diagnostics.process_memory import BLOCK, rounded
from petra.engine.recipe import Recipe
from petra.model import _profile_block
from petra.models import MODELS
from petra.plan import make_plan
from petra.reversible import Coupling
from petra.staleness import remedies
from petra.training import OPTIMIZERS
from tests.engine.test_any_block import Halves
from tests.support.nets import mixed_net
from tests.support.processes import run_processes

INPUTS, TARGETS = TensorSpec((4, 3, 8, 8), torch.float32), TensorSpec((4,), torch.int64)


def predicted(
    optimizer: str = "sgd", *, processes: int = 1, process: int = 0, average: float | None = None, refetch: bool = False
) -> PredictedMemory:
    net = mixed_net(dtype=torch.float32)
    plan = make_plan(net, INPUTS, method="petra", k=2, processes=processes, device_type="cuda", refetch=refetch)
    recipe = Recipe(OPTIMIZERS[optimizer], lambda m: 0.1, rules=UpdateRules(average=average))
    return predict_memory(plan, recipe, TARGETS)[process]


def test_weights_gradients_and_states_are_those_of_the_parameters() -> None:
    modules = [block.build() for block in mixed_net(dtype=torch.float32).blocks]
    parameters = [p.nbytes for module in modules for p in module.parameters()]
    buffers = [b.nbytes for module in modules for b in module.buffers()]
    sgd, adam, averaged = predicted(), predicted("adamw"), predicted(average=0.9)
    total = sum(map(rounded, parameters))
    assert sgd.weights == total + sum(map(rounded, buffers))
    assert sgd.gradients == sgd.optimizer == total
    assert adam.optimizer == 2 * total + BLOCK * len(parameters)  # a number of steps for each parameter
    assert averaged.optimizer == 2 * sgd.optimizer


def test_a_block_whose_function_reads_values_is_counted() -> None:
    def orthogonal() -> nn.Module:
        return nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))

    model = Model("mine", (BlockSpec("a", lambda: nn.Linear(8, 8)), BlockSpec("b", orthogonal)))
    plan = make_plan(model, TensorSpec((4, 8), torch.float32), method="petra", device_type="cuda")
    (found,) = predict_memory(plan, Recipe(OPTIMIZERS["sgd"], lambda m: 0.1), TARGETS)
    assert found.weights == sum(rounded(t.nbytes) for t in model.build(0).state_dict().values())


def test_a_stage_that_fetches_its_input_again_does_not_store_it() -> None:
    """The last microbatch in flight is the input of the forward that has just ended."""
    stored, refetched = (predicted(processes=6, refetch=refetch) for refetch in (False, True))
    assert stored.stored - refetched.stored == 10 * INPUTS.bytes


def test_equal_stages_and_blocks_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the work, not seconds: of 40 layers of a transformer in 40 stages, a few are profiled and counted."""
    profiled: list[str] = []
    monkeypatch.setattr("petra.model._profile_block", lambda name, *rest: (profiled.append(name), _profile_block(name, *rest))[1])
    network, known = MODELS["revgpt"](64, dim=16, depth=40, heads=4, size=16), Known()
    plan = make_plan(network, TensorSpec((2, 16), torch.int64), k=40, processes=len(network.blocks), device_type="cuda")
    predict_memory(plan, Recipe(OPTIMIZERS["adamw"], lambda t: 0.1), TensorSpec((32,), torch.int64), known)
    assert len({*profiled}) == len(profiled) <= 5
    assert len(known) <= 8


def test_an_optimizer_that_reads_values_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"optim: expected an optimizer that reads no values .*, got BasisRotation"):
        predicted("basis_rotation")


def test_what_a_step_allocates_counts_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wasteful(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            torch.empty(2**20)

    monkeypatch.setitem(OPTIMIZERS, "wasteful", lambda module: Wasteful(module.parameters()))
    assert predicted("wasteful").temporary > 2**21 > predicted().temporary


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_nothing_is_allocated(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FakeTensorMode runs kernels that it doesn't know on real tensors; those of fused optimizers would need all weights."""
    fallbacks = []
    kernel = fake_tensor.run_fallback_kernel
    monkeypatch.setattr(fake_tensor, "run_fallback_kernel", lambda mode, op, *rest: fallbacks.append(op) or kernel(mode, op, *rest))
    predicted(optimizer)
    assert fallbacks == []


class Zeros:
    """Microbatches of zeros."""

    def inputs(self, m: int) -> torch.Tensor:
        return torch.zeros(8, 3, 32, 32)

    def targets(self, m: int) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.int64)


def untrained(build: Callable[[], nn.Module]) -> nn.Module:
    return build().requires_grad_(False)


def peaks(
    method: str | Method,
    stages: int,
    wire: str | None = None,
    model: str = "revnet18",
    bf16: bool = False,
    autocast: bool = False,
    frozen: int = 0,
    **values: Any,
) -> Any:
    """Return the most bytes of real tensors while a pipeline is built and trained in one process, and the prediction.

    Args:
        frozen: Number of blocks, from the first, that are not trained.
    """
    net, inputs = MODELS[model](5, width=0.25), TensorSpec((8, 3, 32, 32), torch.float32)
    blocks = (BlockSpec(b.name, partial(untrained, b.build)) if i < frozen else b for i, b in enumerate(net.blocks))
    net = Model(net.name, tuple(blocks)) if frozen else net
    numerics, rules = (
        Numerics(torch.bfloat16 if bf16 or autocast else None, message_format=wire),
        UpdateRules(weights="bf16" if bf16 else "float32"),
    )
    recipe = Recipe(OPTIMIZERS["sgd"], lambda m: 0.1, rules=rules, extensions=remedies(**values))
    k = 6 if method == "pipedream_2bw" else 2
    with LiveBytes() as live:
        pipeline = Pipeline(net, inputs, recipe, method=method, k=k, stages=stages, numerics=numerics)
        pipeline.train(Zeros(), max(pipeline.plan.delays) + 2 * k)
    (found,) = predict_memory(pipeline.plan, recipe, TensorSpec((8,), torch.int64))
    return live.most, found.tensors


@pytest.mark.parametrize(
    ("method", "stages", "wire"),
    [
        *(("petra", 3, None), ("petra", 10, None), ("petra", 10, "bf16"), ("backprop", 3, None), ("pipedream", 3, None)),
        *(("dsp", 3, None), ("1f1b", 3, "bf16"), ("reconstruct_stashed", 3, None), ("gpipe", 3, None)),
        *(("pipedream_2bw", 3, None), ("petra", 3, "int8"), ("petra", 10, "int4_token_stochastic")),
    ],
)
def test_peak_is_that_of_the_engine(method: str, stages: int, wire: str | None) -> None:
    measured, predicted = peaks(method, stages, wire)
    assert measured <= predicted <= 1.09 * measured


@pytest.mark.parametrize(("method", "stages", "frozen"), [("petra", 5, 6), ("petra", 5, 5), ("dsp", 5, 6)])
def test_stages_before_the_first_trained_parameter_only_run_forward(method: str, stages: int, frozen: int) -> None:
    """The first trained parameter may be in the middle of a stage, which runs backward as a whole. Its check needs some more."""
    measured, predicted = peaks(method, stages, frozen=frozen)
    assert 0.99 * measured <= predicted <= 1.09 * measured


@pytest.mark.parametrize(("rows", "width", "layers"), [(4, 512, 1), (4, 256, 3), (8192, 16, 2)])
def test_the_check_of_an_inverse_needs_the_memory_of_a_backward_pass_and_an_input(rows: int, width: int, layers: int) -> None:
    """Where weights dominate, and where activations do. The first microbatch is checked, the second one is not."""

    class Rows:
        def inputs(self, m: int) -> torch.Tensor:
            return torch.randn(rows, 2 * width)

        def targets(self, m: int) -> torch.Tensor:
            return torch.zeros(rows, dtype=torch.int64)

    f = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())))
    modules = {"c0": Coupling(f), "c1": Coupling(copy.deepcopy(f)), "merge": Halves(), "head": nn.Linear(2 * width, 3)}
    model, recipe = Model.of("mine", {"split": Halves(), **modules}), Recipe(OPTIMIZERS["sgd"], lambda m: 0.1)
    pipeline, most = Pipeline(model, TensorSpec((rows, 2 * width), torch.float32), recipe, method="reversible", k=4), []
    for _ in range(2):
        with LiveBytes() as live:
            pipeline.train(Rows(), 1)
        most.append(live.most)
    one_input, samples = 4 * rows * 2 * width, 2**16 * len(model.blocks)
    assert most[0] <= most[1] + one_input + samples


def test_graphs_under_autocast_refer_to_parameters() -> None:
    """With weights in bfloat16 and with casts of float32 ones, graphs in flight store neither."""
    for bf16 in (None, "float32", "bf16"):
        graphs = Method("graphs", 2, Keep.GRAPH)
        measured, predicted = peaks(graphs, 3, autocast=bf16 is not None, bf16=bf16 == "bf16")
        assert measured <= predicted <= 1.05 * measured, bf16


def test_what_remedies_and_other_weights_store_counts() -> None:
    plain = peaks("petra", 3)
    for values in ({"correction": 0.3}, {"feedback": 1.0}, {"prediction": "velocity"}, {"prediction": "difference"}):
        measured, predicted = peaks("petra", 3, **values)
        assert measured - plain[0] == predicted - plain[1] > 0
    for method, model, bf16 in (("pipedream_2bw", "resnet18", False), ("pipedream", "resnet18", True), ("petra", "revnet18", True)):
        measured, predicted = peaks(method, 3, model=model, bf16=bf16)
        assert measured <= predicted <= 1.09 * measured


def live_of_rank(rank: int) -> tuple[int, int]:
    """Return the most bytes of live tensors of this process of two, and the prediction."""
    torch.set_num_threads(1)
    net, inputs, recipe = MODELS["revnet18"](5, width=0.25), TensorSpec((8, 3, 32, 32), torch.float32), Recipe(OPTIMIZERS["sgd"])
    recipe = replace(recipe, learning_rate=lambda m: 0.1)
    with LiveBytes() as live:
        pipeline = Pipeline(net, inputs, recipe, method=Method("half", 1, Keep.NOTHING), k=2, stages=2)
        assert pipeline.plan.transport == "edge"
        pipeline.train(Zeros(), 12)
    return live.most, predict_memory(pipeline.plan, recipe, TensorSpec((8,), torch.int64), device_type="cpu")[rank].tensors


@pytest.mark.processes
def test_buffers_of_receives_that_are_posted_in_advance_count(tmp_path: Path) -> None:
    """Between CPUs, the edge transport has buffers of messages that have not arrived: a fifth of what these stages need."""
    for measured, predicted in run_processes(2, live_of_rank, tmp_path):
        assert 0.99 * measured <= predicted <= 1.05 * measured
