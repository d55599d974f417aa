"""Optimizer state divided over replicas, against the same replicas with whole states."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from petra import ConfigError, Numerics, Pipeline, Recipe, TensorSpec, UpdateRules
from petra.cost_model.memory import predict_memory
from petra.diagnostics.process_memory import rounded
from petra.engine.options.sharding import divide, elements, keep_share
from petra.plan import make_plan
from petra.staleness import Correction, Discount, WeightPrediction
from petra.training import Checkpoints
from petra.training.optim import OPTIMIZERS
from tests.support.nets import RandomSource, assert_equal, make_pipeline, mixed_net, restored
from tests.support.processes import run_processes

STREAM = RandomSource(batch=8)
CASES: dict[str, dict[str, Any]] = {
    "petra": {"rules": {"clip": 0.05, "average": 0.9}},
    "graphs in flight": {"method": "delayed", "optimizer": "sgd"},
    "double weights": {"method": "pipedream_2bw", "optimizer": "adam", "rules": {"loss_scale": "dynamic", "nonfinite": "skip"}},
    "clipped globally": {"method": "1f1b", "optimizer": "nadam", "rules": {"clip": 0.05, "clip_globally": True}},
    **{name: {"optimizer": name} for name in ("muon", "basis_rotation")},
}


def pipeline(*, shard: bool, dp: int = 2, method: str = "petra", optimizer: str = "adamw", rules: Any = ()) -> Pipeline:
    """Return a pipeline of two stages with k = 2. Convolutions have the channels-last memory format."""
    settings = {"method": method, "k": 2, "stages": 2, "dp": dp, "numerics": Numerics(channels_last=True)}
    settings |= {
        "optimizer": OPTIMIZERS[optimizer],
        "learning_rate": lambda t: 0.01,
        "rules": UpdateRules(shard=shard, **dict(rules)),
    }
    return make_pipeline(mixed_net(), STREAM.spec, **settings)


def optimizer_bytes(trained: Pipeline) -> list[int]:
    """Return the bytes of the optimizer state of each parameter of this process's stage, without numbers, in rising order."""
    (worker,) = trained.workers.values()
    assert worker.update.optimizer is not None
    return sorted(sum(t.nbytes for t in state.values() if t.dim()) for state in worker.update.optimizer.state.values())


def outcome(trained: Pipeline) -> dict[str, Any]:
    averages = {}
    with trained.averaged():
        averages = {key: value.clone() for key, value in trained.state_dict().items()}
    return {"weights": trained.state_dict(), "averages": averages, "metrics": trained.stage_metrics()}


def train_all(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        for shard in (False, True):
            trained = pipeline(shard=shard, **case)
            trained.train(STREAM, 7)
            found[f"{name} {shard}"] = outcome(trained) | {"bytes": optimizer_bytes(trained)}
            if name == "petra":
                store = Checkpoints(folder / str(shard))
                store.save(trained, {})
                trained.train(STREAM, 6)
                found[f"uninterrupted {shard}"] = outcome(trained)
    for saved, shard in ((True, True), (True, False), (False, True)):
        found[f"resumed {saved} {shard}"] = outcome(resumed(folder / str(saved), shard=shard))
    return found


def resumed(folder: Path, **settings: Any) -> Pipeline:
    continued = restored(pipeline(**settings, **CASES["petra"]), folder)
    continued.train(STREAM, 6)
    return continued


@pytest.mark.processes
def test_divided_state_changes_no_bit(tmp_path: Path) -> None:
    """Two stages in two replicas each. Seven microbatches end between two updates, where the checkpoint is written."""
    torch.set_num_threads(1)
    parts = run_processes(4, train_all, tmp_path, tmp_path, timeout=240)
    for rank, part in enumerate(parts):
        for name in CASES:
            whole, divided, other = part[f"{name} False"], part[f"{name} True"], parts[(rank + 2) % 4][f"{name} True"]
            assert sorted(divided["bytes"] + other["bytes"]) == whole["bytes"]
            assert abs(sum(divided["bytes"]) - sum(other["bytes"])) <= max(whole["bytes"])  # no parameter is split
            assert_equal([divided["weights"], divided["averages"]], [whole["weights"], whole["averages"]])
            assert divided["metrics"] == whole["metrics"]
        for name in ("uninterrupted True", "resumed True True", "resumed True False", "resumed False True"):
            assert_equal(part[name], part["uninterrupted False"])
    states = [outcome(resumed(tmp_path / str(saved), shard=shard, dp=1)) for saved, shard in ((False, False), (True, True))]
    assert_equal(*states)  # also of one replica, which has the whole state
    plan = make_plan(mixed_net(), STREAM.spec, method="petra", k=2, stages=2, processes=4, dp=2)
    memory = predict_memory(plan, Recipe(OPTIMIZERS["adamw"], rules=UpdateRules(shard=True)), TensorSpec((4,), torch.int64))
    for j in (0, 1):  # of each parameter two averages and the number of steps, which the allocator of a GPU rounds up to 512 bytes
        most = max((part["petra True"]["bytes"] for part in parts[j::2]), key=sum)
        assert memory[j].optimizer == sum(2 * rounded(size // 2) + rounded(4) for size in most)


def test_shares_have_about_the_same_size() -> None:
    parameters = [torch.empty(n) for n in (1, 9, 4, 4, 2, 2)]
    assert [elements(share) for share in divide(parameters, 2)] == [11, 11]
    assert [elements(share) for share in divide(parameters, 8)] == [9, 4, 4, 2, 2, 1, 0, 0]


def test_what_can_not_be_divided_is_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    module = nn.Linear(2, 2)
    expected = "optim.shard: expected false with an optimizer that is neither torch's nor petra's, got true with Own"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        keep_share(Own(module.parameters(), lr=0.1), divide([*module.parameters()], 2), 0)
    make = partial(make_pipeline, mixed_net(), STREAM.spec, optimizer=OPTIMIZERS["sgd"], learning_rate=lambda t: 0.1)
    for remedies, name in (([WeightPrediction("velocity")], "WeightPrediction"), ([Discount(10), Correction(0.9)], "Correction")):
        expected = f"optim.shard: expected false with the extension {name}, which acts at updates, got true"
        with pytest.raises(ConfigError, match=re.escape(expected)):
            make(rules=UpdateRules(shard=True), extensions=remedies)
    make(rules=UpdateRules(shard=True), extensions=[Discount(10)]).train(STREAM, 1)  # and one replica has the whole state
