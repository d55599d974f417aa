"""Stages whose linear layers two processes divide, against whole ones."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from petra import Extension, Numerics, Pipeline, Recipe, Runtime, TensorSpec, UpdateRules, make_plan
from petra.engine.options.tensor_parallel import TensorReplicas
from petra.errors import PetraError
from petra.model import BlockSpec, Model
from petra.models import gpt, revgpt
from petra.models.attention import MLP, Attention, LayerOptions
from petra.plan.layout import make_layout
from petra.staleness import Correction, Feedback, WeightPrediction
from petra.training import Checkpoints
from petra.training.optim import OPTIMIZERS
from petra.training.weight_files import export, load
from tests.support.nets import RandomSource, RandomTokens, assert_equal, make_pipeline, mixed_net, restored, sgd, weights
from tests.support.processes import run_processes
from tests.support.refusals import refuses

TEXTS = RandomTokens(4, 12, 20)
MODELS: dict[str, Callable[[], Model]] = {
    "gpt": lambda: gpt(20, 32, 2, 4, size=12, kv_heads=2, qk_norm=True, mlp="swiglu", hidden=24, delimiter=0),
    "revgpt": lambda: revgpt(20, 32, 2, 4, size=12),
    "modern": lambda: revgpt(20, 32, 2, 4, size=12, norm="rmsnorm", bias=False, positions="rotary"),
}
CASES: dict[str, dict[str, Any]] = {
    "gpt": {"model": "gpt", "rules": UpdateRules(clip=0.5, average=0.9)},
    "revgpt": {"model": "revgpt", "rules": UpdateRules(clip=0.5)},
    "bf16 messages": {"model": "modern", "numerics": Numerics(message_format="bf16")},
    "clipped globally": {"model": "revgpt", "method": "1f1b", "rules": UpdateRules(clip=0.5, clip_globally=True)},
    "old weights": {"model": "modern", "method": "pipedream"},
    "remedies": {"model": "revgpt", "extensions": [WeightPrediction("difference"), Feedback(0.5)]},
    "correction": {"model": "revgpt", "extensions": [Correction(0.1)]},
    "divided state": {
        "model": "gpt",
        "stages": 1,
        "dp": 2,
        "optimizer": OPTIMIZERS["adamw"],
        "learning_rate": lambda t: 0.001,  # AdamW takes full steps by gradients that are all rounding
        "rules": UpdateRules(shard=True),
    },
}
SAVED = ("gpt", "divided state")
"""Cases whose runs are saved and continued."""


def pipeline(case: str, tp: int, **changes: Any) -> Pipeline:
    settings = {"optimizer": sgd, "learning_rate": lambda t: 0.05, "k": 2, "stages": 2, **CASES[case], **changes}
    if tp == 1:
        settings |= {"dp": 1, "rules": replace(settings.get("rules", UpdateRules()), shard=False)}
    return make_pipeline(MODELS[settings.pop("model")](), TEXTS.spec, **settings, runtime=Runtime(tp=tp))


def trained(made: Pipeline, microbatches: int = 7) -> dict[str, Any]:
    """Train, and return what can be compared. Seven microbatches end between two updates."""
    loss = made.train(TEXTS, microbatches).loss
    evaluated = made.evaluate(TEXTS, 2).loss  # with averaged weights, if there are any
    return {"weights": weights(made), "numbers": {"loss": loss, "evaluated": evaluated, **made.stage_metrics()}}


def train_all(rank: int, tp: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        made = pipeline(case, tp)
        found[case] = trained(made)
        if case in SAVED:
            Checkpoints(folder / f"{case} {tp}").save(made, {})
            export(made, folder / f"{case} {tp}.pt")
            found[f"{case}, continued"] = trained(made)
    return found


def resumed(rank: int, case: str, tp: int, folder: Path) -> dict[str, Any]:
    made = restored(pipeline(case, tp), folder)
    return {"loaded": weights(made), "continued": trained(made)}


def joint(parts: list[dict[str, Any]], *keys: str) -> dict[str, Tensor]:
    """Return the weights of all processes by name."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for key in keys:
            part = part[key]
        found |= part
    return found


@pytest.mark.processes
def test_divided_stages_equal_whole_ones(tmp_path: Path) -> None:
    """Two stages of two processes each, and in one case two replicas of one stage, against one process."""
    torch.set_num_threads(1)
    whole, parts = train_all(0, 1, tmp_path), run_processes(4, train_all, tmp_path, 2, tmp_path, timeout=240)
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        assert_equal(first, second)  # both processes of a group have the same numbers
    for case, expected in whole.items():
        tolerance = {"rtol": 1e-4, "atol": 1e-4 if case == "bf16 messages" else 2e-6}
        found = joint(parts, case, "weights")
        torch.testing.assert_close(found, expected["weights"], **tolerance, msg=lambda text, case=case: f"{case}: {text}")
        torch.testing.assert_close(parts[0][case]["numbers"], expected["numbers"], rtol=1e-4, atol=0)
    back = run_processes(4, resumed, tmp_path / "back", "gpt", 2, tmp_path / "gpt 1", timeout=120)
    assert_equal(joint(back, "loaded"), load(tmp_path / "gpt 1.pt"))  # saved whole, loaded divided
    torch.testing.assert_close(joint(back, "continued", "weights"), whole["gpt, continued"]["weights"], rtol=1e-4, atol=2e-6)
    for case in SAVED:  # saved divided, loaded whole
        one = resumed(0, case, 1, tmp_path / f"{case} 2")
        assert_equal(one["loaded"], joint(parts, case, "weights"))
        assert_equal(one["loaded"], load(tmp_path / f"{case} 2.pt"))
        continued = joint(parts, f"{case}, continued", "weights")
        torch.testing.assert_close(one["continued"]["weights"], continued, rtol=1e-4, atol=2e-6)


class Misfit(MLP):
    """Units that are not as many as the layer has."""

    def divisible(self, tp: int) -> dict[str, tuple[int, ...] | str]:
        return {**super().divisible(tp), "up": (2,)}


def hooked(kind: type[MLP] = MLP, dropout: float = 0.0) -> nn.Module:
    mlp = kind(LayerOptions(8, dropout=dropout))
    mlp.up.weight.register_hook(lambda gradient: gradient)
    return nn.Sequential(mlp, nn.Flatten(), nn.Linear(16, 5))


def refused(rank: int) -> list[str]:
    """Return the messages of what two processes can't divide."""
    divided, spec = {"optimizer": sgd, "runtime": Runtime(tp=2)}, TensorSpec((4, 2, 8), torch.float32)
    tied = MLP(LayerOptions(8, hidden=8))
    tied.down = tied.up
    attempts: list[Callable[[], Pipeline]] = [
        lambda: pipeline("revgpt", 2, stages=1, optimizer=OPTIMIZERS["muon"]),
        lambda: make_pipeline(mixed_net(), RandomSource().spec, **divided),
        lambda: make_pipeline(Model("hooked", (BlockSpec("layer", hooked),)), spec, **divided),
        lambda: make_pipeline(Model.of("tied", nn.Sequential(tied, nn.Flatten(), nn.Linear(16, 5))), spec, **divided, stages=1),
        lambda: make_pipeline(Model("misfit", (BlockSpec("layer", partial(hooked, Misfit)),)), spec, **divided),
        lambda: make_pipeline(Model("random", (BlockSpec("layer", partial(hooked, dropout=0.1)),)), spec, **divided),
    ]
    found = []
    for attempt in attempts:
        with pytest.raises(PetraError) as error:
            attempt()
        found.append(str(error.value))
    return found


@pytest.mark.processes
def test_what_needs_whole_layers_is_refused(tmp_path: Path) -> None:
    muon, without, hooks, tied, misfit, random = run_processes(2, refused, tmp_path, timeout=60)[0]
    assert "tp: expected 1 with an optimizer that needs whole parameters, or that isn't torch's, got Muon" in muon
    assert "tp: expected 1 for a model without layers that can be divided, got 2" in without
    assert "tp: expected parameters of up without hooks" in hooks
    assert "tp: expected 1 with layers that occur twice, got up" in tied
    assert "dropout: expected 0 with tp, as all processes draw the same numbers, got 0.1" in random
    assert "tp: expected 1 with layers that can't be divided, got up: (2,) of Linear(in_features=8" in misfit


class Mine(Extension):
    """A remedy of one's own."""


LAYOUT, CPU = make_layout(MODELS["revgpt"](), TEXTS.spec, 2, 4, 1, 2), torch.device("cpu")


test_settings_that_tensor_parallelism_excludes = refuses(
    lambda call, *arguments: call(*arguments),
    (TensorReplicas, LAYOUT, 0, Recipe(sgd, extensions=[Mine()]), Runtime(), CPU, None, "tp: expected 1 with the extension Mine"),
    (TensorReplicas, LAYOUT, 0, Recipe(sgd), Runtime(compile="eager"), CPU, None, "compile: expected None with tp > 1, got eager"),
    (TensorReplicas, LAYOUT, 0, Recipe(sgd), Runtime(), CPU, object(), "tp: expected 1 with replicas that may be lost, got 2"),
    (Attention(LayerOptions(24, heads=3)).divisible, 2, "tp: expected a divisor of 3, the number of key and value heads, got 2"),
    (partial(make_plan, MODELS["gpt"](), TEXTS.spec, processes=6, dp=2, tp=2), "tp: expected a divisor of 3, the number of proc"),
)


def test_processes_of_a_group_have_one_place() -> None:
    assert [LAYOUT.locate(rank) for rank in range(4)] == [(0, 0), (0, 0), (0, 1), (0, 1)]
