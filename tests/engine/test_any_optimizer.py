"""Optimizers by name, of torch and of other packages: resumed runs, bytes of states, weights for evaluation, and refusals."""

import copy
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launch.config.schema import Section
from launch.run.targets import optimizer_factory
from petra import ConfigError, Model, Pipeline, UpdateRules
from petra.cost_model.stage_memory import count_stage
from petra.diagnostics.process_memory import rounded
from petra.staleness import WeightPrediction
from petra.torch_private import inner_tensors
from petra.training.state import load_state, state_of
from tests.support.nets import RandomSource, assert_equal, make_pipeline

STREAM = RandomSource(size=4, dtype=torch.float32)


class Own(torch.optim.SGD):
    """Counts steps in three places, has its rate in a tensor, and evaluates a mean of the weights."""

    def __init__(self, params: Any, fault: str = "") -> None:
        super().__init__(params, torch.tensor(0.1))
        self.calls, self.fault, self.param_groups[0]["training"] = 0, fault, True

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        self.calls, group["steps"] = self.calls + 1, group.get("steps", 0) + 1
        if self.fault == "idle":
            return
        super().step()
        for p in group["params"]:
            state = self.state[p]
            p.data.add_(torch.randn_like(p), alpha=0.01 * (self.fault == "noise"))
            state["count"] = [] if self.fault == "list" else state.get("count", 0) + 1
            mean = state.setdefault("mean", p.detach().double())
            mean.lerp_(p.detach().double(), 1 / min(group["steps"], self.calls, state["count"] or 1))

    def train(self, training: bool = True) -> None:
        (group,) = self.param_groups
        for p in group["params"] if group["training"] != training and self.calls else []:
            self.state[p]["mean"], p.data = p.data.double(), self.state[p]["mean"].to(p.dtype)
        group["training"] = training

    def eval(self) -> None:
        self.train(False)


def named(name: str, **options: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    package = name.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with torch.compiler.set_stance("force_eager"):
        return optimizer_factory(Section(_target_=name, options=options))


def pipeline(optimizer: Any, stages: int = 2, **settings: Any) -> Pipeline:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 64, 4), nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 5))
    settings = {"k": 2, "learning_rate": lambda t: 0.01 / t, **settings}
    return make_pipeline(Model.of("m", layers), STREAM.spec, optimizer=optimizer, stages=stages, **settings)


TORCH = [f"torch.optim.{name}" for name in ("SGD", "Adagrad", "RMSprop", "Adafactor", "NAdam", "ASGD")]
OTHERS = [f"torchao.optim.{name}" for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")]
OTHERS += [f"pytorch_optimizer.{name}" for name in ("Lion", "AdaFactor", "FlashAdamW", "ScheduleFreeAdamW")]


@pytest.mark.parametrize("name", [*TORCH, f"{__name__}.Own", *OTHERS])
def test_a_resumed_run_equals_an_uninterrupted_one(name: str) -> None:
    """The first run ends between two updates, with an evaluation, as an epoch does."""
    make = named(name, **({"fault": "noise"} if name.endswith("Own") else {}))
    with torch.compiler.set_stance("force_eager"):
        runs = [pipeline(make), pipeline(make)]
        runs[0].train(STREAM, 7)
        load_state(runs[1], {key: value.clone() for key, value in state_of(runs[0]).items()}, 7, "checkpoint")
        assert runs[0].evaluate(STREAM, 2) == runs[1].evaluate(STREAM, 2)
        for run in runs:
            run.train(STREAM, 6)
        assert_equal(state_of(runs[1]), state_of(runs[0]))
    if name.endswith(("Adagrad", "AdamW8bit", "AdamW4bit", "Lion")):  # the bytes of states are predicted
        worker: Any = runs[0].workers[0]
        values = [v for state in worker.update.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        live = sum(rounded(part.nbytes) for value in values for part in (inner_tensors(value) or {"": value}).values())
        found = count_stage(runs[0].plan.model, runs[0].plan.stages[0], recipe=runs[0].recipe).optimizer
        assert live <= found <= live + 512  # torchao has its learning rate in a tensor


@pytest.mark.parametrize("name", [f"{__name__}.Own", "pytorch_optimizer.ScheduleFreeAdamW"])
def test_a_drained_pipeline_has_the_weights_for_evaluation(name: str) -> None:
    trained = pipeline(named(name), 1, k=1, method="backprop")
    module = nn.Sequential(*(copy.deepcopy(block) for _, block in trained.blocks()))
    optimizer: Any = named(name)(module)
    for m in range(5):
        optimizer.train()
        optimizer.param_groups[0]["lr"] = 0.01 / (m + 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(STREAM.inputs(m)), STREAM.targets(m)).backward()
        optimizer.step()
    inner = [p.detach().clone() for p in module.parameters()]
    optimizer.eval()
    trained.train(STREAM, 5)
    found = [p for _, block in trained.blocks() for p in block.parameters()]
    torch.testing.assert_close(found, [*module.parameters()], rtol=1e-5, atol=1e-7)
    assert all((p - q).abs().max() > 1e-6 for p, q in zip(found, inner, strict=True))


def test_optimizers_that_would_train_wrongly_are_refused() -> None:
    own, target = partial(named, f"{__name__}.Own"), "optim._target_: expected an optimizer"
    cases: dict[str, Callable[[], object]] = {
        f"{target} that keeps tensors by parameter, and numbers, which checkpoints contain": lambda: own(fault="list"),
        f"{target} whose step changes weights, got {__name__}.Own": lambda: own(fault="idle"),
        "one whose step needs no closure": lambda: pipeline(named("torch.optim.LBFGS")),
        "optim.average: expected null with Own, which has": lambda: pipeline(own(), rules=UpdateRules(average=0.9)),
        "remedy: expected none that acts at": lambda: pipeline(own(), extensions=[WeightPrediction("difference")]),
    }
    for message, call in cases.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            call()
