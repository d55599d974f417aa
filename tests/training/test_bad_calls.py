"""Calls with arguments that can't be meant, and folders whose names or numbers contradict what is in them."""

import json
from collections.abc import Callable
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launch.run.folder import CONFIG, FORMAT, METRICS, SUMMARY, epochs_in, summary_in
from launch.run.weights import SavedWeights
from petra import Model, PetraError, Pipeline, Recipe, TensorSpec, make_plan
from petra.cost_model.machines import Link
from petra.data import EvalSource, TrainSource, load_dataset
from petra.hooks import Hook
from petra.inplace_abn import ConfusionMatrix
from petra.models.generation import Sampling
from petra.reversible import Coupling
from petra.training import Checkpoints, MultiStep, Trainer, export, load, newest, restore
from petra.training.loggers import WandbLogger
from petra.training.state import load_state, state_of
from tests.support.nets import RandomSource, assert_equal, hook, make_pipeline, mixed, mixed_net, sgd


def build(seed: int = 0, k: int = 1) -> Pipeline:
    settings = {"learning_rate": MultiStep(0.1, 2, 2), "optimizer": lambda m: torch.optim.SGD(m.parameters()), "seed": seed, "k": k}
    return make_pipeline(mixed_net(), RandomSource().spec, **settings)


def trainer(train: object = TrainSource, test: object = EvalSource, limit: int | None = None, **settings: Any) -> Trainer:
    data = load_dataset("synthetic", images=16, size=8)
    made = {TrainSource: TrainSource(data, 2, 0), EvalSource: EvalSource(data, 2)}
    return Trainer(build(**settings), made[train], made[test], limit=limit)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_network_that_is_frozen_as_a_whole_is_evaluated_only(stages: int) -> None:
    model = Model.of("frozen", nn.Sequential(nn.Flatten(), nn.Linear(192, 5)).double().requires_grad_(False))
    pipeline = make_pipeline(model, RandomSource().spec, optimizer=sgd, stages=stages)
    pipeline.evaluate(RandomSource(), 1)
    with pytest.raises(PetraError, match="model: expected a parameter that requires a gradient, got none"):
        pipeline.train(RandomSource(), 1)


class Failing(RandomSource):
    """Fails in the middle of an update."""

    def inputs(self, m: int) -> Tensor:
        if m == 3:
            raise KeyboardInterrupt
        return super().inputs(m)


def failed() -> Pipeline:
    pipeline = build(k=2)
    pipeline.train(Failing(), 2)
    with pytest.raises(KeyboardInterrupt):
        pipeline.train(Failing(), 2)
    return pipeline


def test_a_restored_pipeline_is_saved_again(tmp_path: Path) -> None:
    (good := build(k=2)).train(Failing(), 2)
    Checkpoints(tmp_path).save(good, {})
    pipeline, found = failed(), newest(tmp_path)
    assert found is not None
    restore(pipeline, found)
    Checkpoints(tmp_path / "again").save(pipeline, {})
    assert_equal(pipeline.state_dict(), good.state_dict())


def after_others() -> Trainer:
    """Return a trainer whose pipeline has trained without it."""
    found = trainer()
    found.pipeline.train(RandomSource(), 2)
    return found


def run(targets: Tensor | None = None, **settings: object) -> None:
    """Train a pipeline of three classes."""
    data = RandomSource()
    model = Model.of("m", nn.Sequential(nn.Flatten(), nn.Linear(data.inputs(0)[0].numel(), 3)).double())
    pipeline = Pipeline(model, data.spec, Recipe(**{"optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.1), **settings}))
    found = torch.zeros(len(data.inputs(0)), dtype=torch.long) if targets is None else targets
    source: Any = SimpleNamespace(inputs=data.inputs, targets=lambda m: found)
    pipeline.train(source, 2)


FIRST = nn.Linear(2, 2)
ROWS = len(RandomSource().inputs(0))


def test_a_fault_in_a_loss_is_not_one_of_the_targets() -> None:
    with pytest.raises(IndexError, match="list index out of range"):
        run(torch.tensor([0, 2, -100]).repeat(ROWS)[:ROWS], loss=lambda y, t: [y.sum()][1])


@pytest.mark.parametrize(
    ("inputs", "targets", "found"), [(1.0, -100, "0 with the loss 0.0"), (float("nan"), 0, f"{2 * ROWS} with the loss nan")]
)
def test_an_evaluation_without_targets_or_a_finite_loss_is_a_warning(
    inputs: float, targets: int, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    source: Any = SimpleNamespace(
        inputs=lambda m: torch.full_like(RandomSource().inputs(0), inputs), targets=lambda m: torch.full((ROWS,), targets)
    )
    build().evaluate(source, 2)
    assert caplog.messages == [f"evaluation: expected targets with a finite loss, got {found}"]
    build().evaluate(RandomSource(), 2)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (lambda path, t=targets: run(t), rf"targets: expected some that fit float64\[{ROWS}, 3\], {got}")
            for targets, got in (
                (torch.arange(1, ROWS + 1), rf"from 0 to 2, got int64\[{ROWS}\] from 1 to {ROWS} \(Target . is out of bounds"),
                (torch.full((ROWS,), -1), rf"from 0 to 2, got int64\[{ROWS}\] from -1 to -1 \(Target -1"),
                (torch.zeros(ROWS, dtype=torch.float64), rf"got float64\[{ROWS}\] from 0.0 to 0.0"),
                (torch.zeros(ROWS, 1, dtype=torch.long), rf"got int64\[{ROWS}, 1\]"),
            )
        ),
        (  # a function in C, called by a loss that is not torch's
            lambda path: run(torch.full((ROWS,), 3), loss=lambda y, t: -y.gather(1, t[:, None]).mean()),
            r"targets: expected some that fit .*, from 0 to 2, got .* from 3 to 3 \(index 3 is out of bounds",
        ),
        (lambda path: Coupling(nn.Linear(4, 1))(torch.ones(2, 4), torch.ones(2, 4)), r"f: .* stream, \[2, 4\], got \[2, 1\]"),
        (lambda path: run(loss=lambda y, t: torch.zeros(())), "loss: expected a function of the output"),
        *(
            (lambda path, r=rate: run(learning_rate=lambda t: r), rf"learning_rate\(1\): expected a number >= 0, got {rate!r}")
            for rate in (-0.1, None, "a")
        ),
        (lambda path: run(learning_rate=lambda: 0.1), "learning_rate: expected a function of the microbatches done"),
        (lambda path: run(optimizer=lambda m: torch.optim.SGD(FIRST.parameters(), 0.1)), "optimizer: expected one of all"),
        (lambda path: run(optimizer=lambda m: torch.optim.SGD([*m.parameters()][:1], 0.1)), "optimizer: expected one of all"),
        (lambda path: run(metrics={"loss": lambda y, t: y.sum()}), "metrics: expected functions .*, none of them loss"),
        *((lambda path, s=seed: run(seed=s), r"seed: expected an integer >= 0 and < 2\^63") for seed in (-1, 2**70)),
        (lambda path: make_plan(mixed_net(), TensorSpec((0, 3, 8, 8), torch.float64)), r"inputs: .* without a dimension of 0"),
        (lambda path: Sampling(top_k=2.5), "top_k: expected null or an integer >= 1, got 2.5"),  # type: ignore[arg-type]
        (lambda path: Link(0.0), "bandwidth: expected a number > 0, got 0.0"),
        (lambda path: trainer().resume({**trainer().state(), "epoch": 3}), "checkpoint: expected data with 3 microbatches in an"),
        (lambda path: ConfusionMatrix(0), "classes: expected an integer >= 1, got 0"),
        (lambda path: build().hooks.append(Hook), "hook: expected an object of a subclass of petra.Hook, got <class"),  # type: ignore[arg-type]
        (lambda path: build().hooks.append(hook(forward_beginn=print)), "Functions: expected the event forward_begin, got "),
        (lambda path: Checkpoints(path, every=0), r"checkpoint\.every: expected None or an integer >= 1, got 0"),
        (lambda path: Checkpoints(path).save(build(), {"a": object()}), "cannot be written .*not JSON serializable"),
        (
            lambda path: trainer(k=17).fit(2),
            "k: expected at most the 16 microbatches of the run, which would have no update, got 17",
        ),
        (lambda path: trainer(k=5, limit=2).fit(2), "k: expected at most the 4 microbatches of the run, .*, got 5"),
        *(
            (
                lambda path, save=save: save(failed(), path),
                r"pipeline: expected one whose last train\(\) has returned, .* failed after microbatch 2$",
            )
            for save in (lambda p, path: Checkpoints(path).save(p, {}), lambda p, path: export(p, path / "w.pt"))
        ),
        (
            lambda path: after_others().fit(1),
            r"pipeline: expected 0 microbatches done, as in this trainer's history .*, got 2",
        ),
        (lambda path: trainer(limit=0), "limit: expected None or an integer >= 1, got 0"),
        (lambda path: trainer().fit(-1), "epochs: expected an integer >= 0, got -1"),
        (lambda path: trainer(EvalSource, TrainSource), "train: expected a source with the attribute batches_per"),
    ],
)
def test_arguments(call: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(PetraError, match=message):
        call(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_state_for_another_k_or_optimizer_is_refused() -> None:
    trained = mixed(k=2)
    trained.train(RandomSource(), 4)
    adam = mixed(k=2, optimizer=lambda module: torch.optim.Adam(module.parameters()))
    other = "that of another class"
    cases = {mixed(k=3): "1 updates after 4 microbatches, with k=3, got 2", adam: f"the optimizer state of Adam, got {other}"}
    cases[mixed(k=2, optimizer=lambda module: torch.optim.RMSprop(module.parameters()))] = (
        f"the optimizer state of RMSprop, got {other}"
    )
    for pipeline, message in cases.items():
        with pytest.raises(PetraError, match=f"saved: expected {message}"):
            load_state(pipeline, state_of(trained), 4, "saved")


def test_the_name_of_a_checkpoint_is_its_clock_and_a_score_is_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipeline, store = build(), Checkpoints(tmp_path)
    for score in (0.5, float("nan")):
        pipeline.train(RandomSource(), 2)
        store.save(pipeline, {}, score)
    assert json.loads((tmp_path / "000000004" / "facts.json").read_text())["score"] is None
    (tmp_path / "000000004").rename(tmp_path / "000000009")
    assert newest(tmp_path) == tmp_path / "000000002"
    assert "000000009: expected the name 000000004, its microbatch" in caplog.text
    facts = tmp_path / "000000002" / "facts.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "clock": 7}))
    with pytest.raises(PetraError, match="000000002: expected the name 000000007"):
        restore(build(), tmp_path / "000000002")


def test_weights_are_numbers_and_those_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / CONFIG).touch()
    export(build(), tmp_path / "model.pt")
    export(build(), tmp_path / "model.safetensors")
    assert SavedWeights.at(tmp_path, "run").path.suffix in (".pt", ".safetensors")
    export(build(1), tmp_path / "model.pt")
    with pytest.raises(PetraError, match="run: expected a run whose exports are equal"):
        SavedWeights.at(tmp_path, "run")
    for path in tmp_path.glob("model.*"):
        path.unlink()
    for name, seed in (("model.pt", 1), (CONFIG, 2)):
        content = {"format": FORMAT, "seed": seed}
        export(build(), tmp_path / name, {"config": content}) if seed == 1 else (tmp_path / name).write_text(json.dumps(content))
    SavedWeights.at(tmp_path, "run").print_choice(tmp_path, chosen=False)
    assert f"trained with another seed than {tmp_path / CONFIG} has" in capsys.readouterr().err
    torch.save({"a.weight": torch.tensor([1.0, float("nan")])}, tmp_path / "other.pt")
    with pytest.raises(PetraError, match=r"other\.pt, a\.weight: expected numbers, got NaN"):
        load(tmp_path / "other.pt")


def row(epoch: int, **changes: object) -> str:
    return json.dumps({"epoch": epoch, "microbatches": 4 * epoch, "train_loss": 1.0, "test_loss": 1.5, **changes}) + "\n"


def test_wandb_names_an_environment_variable_that_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    monkeypatch.setenv("WANDB_MODE", "bogus")
    with pytest.raises(PetraError, match=r"logger: wandb can't start .*mode"):
        WandbLogger(tmp_path, {})


@pytest.mark.parametrize(
    ("rows", "summary", "message"),
    [
        (row(1) + row(1), None, r"metrics\.jsonl: expected epochs in order, got 1 after 1"),
        (row(2) + row(1), None, r"metrics\.jsonl: expected epochs in order, got 1 after 2"),
        (row(1, test_accuracy="high"), None, r"metrics\.jsonl: expected a number test_accuracy in line 1, got high"),
        (row(1), {}, r"summary\.json: expected the summary of metrics\.jsonl, got another"),
        (row(1), {"microbatches": 4, "test_loss": 1.25}, r"summary\.json: expected the summary of metrics\.jsonl"),
    ],
)
def test_records_of_a_run(rows: str, summary: object, message: str, tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(rows)
    if summary is not None:
        (tmp_path / SUMMARY).write_text(json.dumps(summary))
    with pytest.raises(PetraError, match=message):
        epochs_in(tmp_path) and summary_in(tmp_path)
    (tmp_path / METRICS).write_text(row(1, sample="text") + row(2, test_accuracy=float("nan"), test_loss=None))
    (tmp_path / SUMMARY).write_text(json.dumps({"microbatches": 8, "test_loss": None}))
    assert (len(epochs_in(tmp_path)), isnan(summary_in(tmp_path)["test_loss"])) == (2, True)
