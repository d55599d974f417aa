"""Weights in bfloat16: with master weights, against float32 weights under autocast, and rounded by the optimizer."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petra import ConfigError, Keep, Method, Numerics, Pipeline, UpdateRules
from petra.cost_model.stage_memory import count_stage
from petra.diagnostics.process_memory import rounded
from petra.engine.options.optimizer_state import MASTER
from petra.staleness import Discount, WeightPrediction
from petra.training import Checkpoints, newest, restore
from petra.training.optim import OPTIMIZERS
from petra.training.state import load_state, state_of
from tests.support.nets import RandomSource, assert_equal, make_pipeline, mixed_net, sgd
from tests.support.processes import run_processes

STREAM = RandomSource(batch=8, dtype=torch.float32)
BF16 = Numerics(autocast=torch.bfloat16)
GRAPHS = Method("graphs", 2, Keep.GRAPH)


class Rounding(torch.optim.SGD):
    """Keeps a bfloat16 momentum, and rounds stochastically, as torchao's optimizers do."""

    bf16_stochastic_round = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad.to(p), 0.5)
                bits = (p.float() - group["lr"] * momentum.float()).view(torch.int32)
                bits = (bits + torch.randint(1 << 16, p.shape, dtype=torch.int32)) & -(1 << 16)
                p.copy_(bits.view(torch.float32))


def pipeline(
    optimizer: Any = "adamw", weights: Any = "bf16", method: str | Method = "petra", stages: int = 2, **rules: Any
) -> Pipeline:
    settings = {"k": 2, "stages": stages, "dp": rules.pop("dp", 1), "method": method, "numerics": BF16}
    settings |= {"optimizer": OPTIMIZERS.get(optimizer, optimizer), "learning_rate": lambda t: 0.01}
    return make_pipeline(mixed_net(dtype=torch.float32), STREAM.spec, rules=UpdateRules(weights=weights, **rules), **settings)


def rounding(module: torch.nn.Module) -> Rounding:
    return Rounding(module.parameters(), 0.01)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["petra", "1f1b", "pipedream_2bw", GRAPHS], ids=str)
def test_with_master_weights_a_run_equals_one_under_autocast_bit_for_bit(optimizer: str, method: str | Method) -> None:
    """Autocast rounds float32 weights to bfloat16 whenever a block uses them; masters are rounded once per update.

    Graphs of weights in bfloat16 refer to the parameters themselves, so those under autocast must follow each update.
    """
    plain, short = (pipeline(optimizer, weights, method, clip=0.05) for weights in ("float32", "bf16"))
    assert plain.train(STREAM, 7) == short.train(STREAM, 7)
    expected = {key: value.bfloat16() if value.dim() > 1 else value for key, value in plain.state_dict().items()}
    assert_equal(short.state_dict(), expected)
    assert plain.evaluate(STREAM, 2) == short.evaluate(STREAM, 2)


def train_all(rank: int, folder: Path, dp: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, optimizer in (("masters", "adamw"), ("rounded", rounding)):
        trained = pipeline(optimizer, dp=dp, clip=0.05, shard=dp > 1 and name == "masters")
        trained.train(STREAM, 7)
        store = Checkpoints(folder / name)
        store.save(trained, {})
        resumed, path = pipeline(optimizer, dp=dp, clip=0.05, shard=dp > 1 and name == "masters"), newest(folder / name)
        assert path is not None
        restore(resumed, path)
        for each in (trained, resumed):
            each.train(STREAM, 6)
        assert_equal(resumed.state_dict(), trained.state_dict())
        found[name] = {key: value.clone() for key, value in trained.state_dict().items()}
    return found


@pytest.mark.processes
def test_several_processes_and_resumed_runs_give_the_same_bits(tmp_path: Path) -> None:
    """Seven microbatches end between two updates, where the checkpoint is written."""
    torch.set_num_threads(1)
    alone = train_all(0, tmp_path / "one", 1)
    for i, parts in enumerate(run_processes(2, train_all, tmp_path, tmp_path / "two", 1, timeout=240)):
        for name, state in parts.items():
            assert_equal(state, {key: value for key, value in alone[name].items() if key in state})
            assert state, i
    replicas = run_processes(4, train_all, tmp_path, tmp_path / "four", 2, timeout=240)
    assert_equal(replicas[:2], replicas[2:])  # also where each rounds by itself


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", rounding])
def test_bytes_are_predicted(optimizer: Any) -> None:
    trained = pipeline(optimizer)
    trained.train(STREAM, 4)
    for j, worker in trained.workers.items():
        assert worker.update.optimizer is not None
        states = [t for state in worker.update.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        found = count_stage(trained.plan.model, trained.plan.stages[j], BF16, recipe=trained.recipe)
        module, parameters = worker.stage.module, worker.stage.gradients.parameters
        sizes = {
            "weights": sum(rounded(t.nbytes) for t in (*module.parameters(), *module.buffers())),
            "optimizer": sum(rounded(t.nbytes) for t in states),
            "gradients": sum(rounded(4 * p.numel()) for p in parameters),
            "version": sum(rounded((2 if p.dim() > 1 else 4) * p.numel()) for p in parameters),
        }
        assert {name: getattr(found, name) for name in sizes} == sizes
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in parameters)


def test_loaded_weights_replace_master_weights() -> None:
    trained, other = pipeline(), pipeline()
    other.train(STREAM, 4)
    trained.load_state_dict(other.state_dict())
    for worker in trained.workers.values():
        assert worker.update.optimizer is not None
        for p, state in worker.update.optimizer.state.items():
            if MASTER in state:
                assert_equal(state[MASTER], p.detach().float())
    before = pipeline()  # a checkpoint before the first update has the initial weights unrounded
    before.train(STREAM, 1)
    resumed = pipeline()
    load_state(resumed, {key: value.clone() for key, value in state_of(before).items()}, 1, "checkpoint")
    for run in (before, resumed):
        run.train(STREAM, 3)
    assert_equal(resumed.state_dict(), before.state_dict())


def test_what_needs_float32_weights_is_refused() -> None:
    class Own(torch.optim.SGD):
        def eval(self) -> None: ...

    def made(**settings: Any) -> Pipeline:
        settings = {"optimizer": OPTIMIZERS["adamw"], "learning_rate": lambda t: 0.1, "numerics": BF16, **settings}
        return make_pipeline(mixed_net(dtype=torch.float32), STREAM.spec, rules=UpdateRules(weights="bf16"), **settings)

    common = {"optimizer": sgd, "numerics": BF16, "rules": UpdateRules(weights="bf16")}
    made(extensions=[Discount(4)])
    for message, call in {
        "without trainer.precision=bf16": lambda: made(numerics=Numerics()),
        "with parameters in float64": lambda: make_pipeline(mixed_net(), RandomSource().spec, **common),
        "with optim.average=0.9": lambda: pipeline(average=0.9),
        "with the extension WeightPrediction": lambda: made(extensions=[WeightPrediction("difference")]),
        "with Own, which trains other weights": lambda: made(optimizer=lambda module: Own(module.parameters())),
    }.items():
        with pytest.raises(ConfigError, match=re.escape(f"optim.weights: expected float32 {message}")):
            call()
