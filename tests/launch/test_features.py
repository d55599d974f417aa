"""Options of training: precision, compilation, metrics, export and evaluation, loggers, presets, the dry run, help."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launch.config.presets import purposes
from launch.config.schema import to_config
from launch.evaluate import main as evaluate
from launch.run.build import set_up
from launch.run.dry_run import stage_map, stage_rows
from launch.run.training import run
from petra import ConfigError, DataError, Keep, Method, Pipeline, UpdateRules, Weights
from petra.engine.endpoints import Losses
from petra.engine.metrics import top5_correct
from petra.engine.options.compile import compile_block
from petra.engine.totals import Result
from petra.models import revnet18
from petra.reversible import Coupling
from petra.settings import Numerics, Runtime
from petra.training import export, gathered_blocks, load, load_into, means, sgd
from tests.launch.test_launch import ALONE, ROOT, TINY, planned, to_composed
from tests.support.nets import RandomSource, make_pipeline, mixed_net
from tests.support.processes import run_processes

pytestmark = pytest.mark.usefixtures("shared_profiles")


def trained(method: str | Method, microbatches: int = 5, **settings: object) -> Pipeline:
    data = RandomSource()
    pipeline = make_pipeline(
        mixed_net(), data.spec, method=method, k=2, optimizer=sgd, learning_rate=lambda t: 0.05, seed=2, **settings
    )  # type: ignore[arg-type]
    pipeline.train(data, microbatches)
    return pipeline


@pytest.mark.parametrize("method", ["petra", Method("s", 2, Keep.INPUT, Weights.STASHED)])
def test_compiled_blocks_train_like_uncompiled_ones(method: str | Method) -> None:
    compiled, plain = trained(method, runtime=Runtime(compile="aot_eager")), trained(method)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[key], value, rtol=1e-9, atol=1e-11)
    data = RandomSource()
    assert compiled.evaluate(data, 2).loss == pytest.approx(plain.evaluate(data, 2).loss, rel=1e-9)


@pytest.mark.parametrize("function", [nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3)], ids=["Sequential", "Linear"])
def test_functions_that_are_modules_of_torch_are_compiled(function: nn.Module) -> None:
    """``Module.compile`` leaves them uncompiled without a message."""
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    block, x = Coupling(function), (torch.randn(2, 3), torch.randn(2, 3))
    before = block(*x)
    compile_block(block, record)
    assert torch.equal(block(*x)[1], before[1])
    assert len(graphs) == 1


def test_fp16_trains_with_streams_in_float32() -> None:
    data = RandomSource(batch=2, size=16, classes=10, dtype=torch.float32)
    losses = {}
    for autocast in (None, torch.float16):
        rules = UpdateRules(loss_scale="dynamic" if autocast else None)
        pipeline = make_pipeline(
            revnet18(width=1 / 16),
            data.spec,
            k=2,
            optimizer=sgd,
            learning_rate=lambda t: 0.01,
            numerics=Numerics(autocast=autocast),
            rules=rules,
        )
        losses[autocast] = pipeline.train(data, 6).loss
        assert all(p.dtype == torch.float32 for p in pipeline.stages[0].module.parameters())
    assert losses[torch.float16] == pytest.approx(losses[None], rel=0.02)
    assert losses[torch.float16] != losses[None]


def test_label_smoothing_is_for_training_only() -> None:
    data = RandomSource()
    smoothed = partial(F.cross_entropy, label_smoothing=0.3)
    pipeline = make_pipeline(
        mixed_net(),
        data.spec,
        method="backprop",
        optimizer=sgd,
        learning_rate=lambda t: 0.0,
        loss=Losses(smoothed, F.cross_entropy),
    )
    plain = mixed_net().build(0)
    assert pipeline.train(data, 1).loss == pytest.approx(smoothed(plain(data.inputs(0)), data.targets(0)).item())
    plain.load_state_dict(pipeline.state_dict())
    assert pipeline.evaluate(data, 1).loss == pytest.approx(F.cross_entropy(plain.eval()(data.inputs(0)), data.targets(0)).item())


def test_top_five() -> None:
    scores = torch.arange(8.0).repeat(3, 1)
    assert top5_correct(scores, torch.tensor([3, 2, -100])).item() == 1


def test_metrics_follow_the_data() -> None:
    for classes, names in ((5, ["accuracy"]), (6, ["accuracy", "top5"])):
        setup = planned("data=synthetic", f"data.classes={classes}", "model.width=0.0625")
        assert list(setup.pipeline(setup.learning_rate(1)).recipe.metrics) == names


def test_perplexity_is_for_tokens_only() -> None:
    result = Result(6, 1.5, {"accuracy": 0.5})
    assert means(result, "tokens") == {"loss": 1.5, "accuracy": 0.5, "perplexity": pytest.approx(math.exp(1.5))}
    assert means(result, "images") == {"loss": 1.5, "accuracy": 0.5}


# --- export and evaluation ---


def exported(rank: int, folder: str) -> dict[str, Tensor]:
    data = RandomSource()
    pipeline = make_pipeline(mixed_net(), data.spec, k=2, optimizer=sgd, learning_rate=lambda t: 0.05, seed=2, stages=2)
    pipeline.train(data, 4)
    export(pipeline, Path(folder) / "model.pt")
    names = [name for name, _ in gathered_blocks(pipeline)]
    assert names == ([block.name for block in pipeline.plan.model.blocks] if rank == 0 else [])
    return pipeline.state_dict()


@pytest.mark.processes
def test_many_processes_export_one_whole_network(tmp_path: Path) -> None:
    parts = run_processes(3, exported, tmp_path / "group", str(tmp_path))
    plain = mixed_net().build(0)
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
    for key, value in (item for part in parts for item in part.items()):
        assert torch.equal(plain.state_dict()[key], value)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_exports_load_strictly_and_back_into_a_pipeline(suffix: str, tmp_path: Path) -> None:
    if suffix == "safetensors":
        pytest.importorskip("safetensors")
    pipeline, path = trained("petra", numerics=Numerics(channels_last=True)), tmp_path / f"model.{suffix}"
    export(pipeline, path)
    mixed_net().build(0).load_state_dict(load(path), strict=True)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    other = trained("petra", 1)
    load_into(other, load(path), "x")
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in pipeline.state_dict().items())
    with pytest.raises(DataError, match=r"x: contains nose\.weight, but mixed has no such block"):
        load_into(other, {"nose.weight": torch.zeros(1)}, "x")
    with pytest.raises(DataError, match=r"x: block stem does not fit \(.*Missing key"):
        load_into(other, {}, "x")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read as exported weights"):
        load(path)
    with pytest.raises(ConfigError, match=r"weights: expected a file name that ends in \.pt or \.safetensors, got \.bin"):
        load(tmp_path / "model.bin")
    with pytest.raises(DataError, match="cannot be written"):
        export(pipeline, tmp_path / "nowhere" / path.name)


def test_a_run_exports_and_is_evaluated_to_its_own_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    overrides = [*TINY, f"run_dir={folder}", "trainer.export=pt", "optim.ema=0.9", "trainer.limit_batches=3", "trainer.stages=3"]
    run(to_config(to_composed(*overrides, "logger=tensorboard" if has("tensorboard") else "logger=jsonl")), ALONE)
    (row,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert row["microbatches"] == 3
    assert {f"stage/{j}/gradient_norm" for j in (1, 2, 3)} <= row.keys()
    assert all(row[f"stage/{j}/gradient_norm"] >= 0 for j in (1, 2, 3))
    assert {"train_top5", "test_top5", "train_accuracy", "images_per_second"} <= row.keys()
    assert bool(list(folder.glob("events.out.tfevents*"))) == has("tensorboard")
    capsys.readouterr()

    evaluate([f"run={folder}", f"weights={folder}/ema.pt"])
    found = json.loads(capsys.readouterr().out)
    assert [found[key] for key in ("loss", "accuracy", "top5")] == [row[f"test_{key}"] for key in ("loss", "accuracy", "top5")]
    evaluate([f"run={folder}", f"weights={folder}/model.pt", "trainer.limit_batches=null"])
    assert json.loads(capsys.readouterr().out)["images"] == 16


def has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run=nowhere"], "run: expected the folder of a run, got nowhere without a config.yaml"),
        (["k=3"], "run: expected the folder of a run (run=FOLDER), got nothing"),
        (["run"], "command line: expected run=FOLDER and key=value, got run"),
        (["run=."], "run: expected a folder with exported weights or checkpoints, got ."),
        (["run=.", "trainer.epoch=3"], "trainer.epoch: no such key; did you mean trainer.epochs?"),
    ],
)
def test_evaluation_refuses(words: list[str], message: str, tmp_path: Path, monkeypatch, capsys) -> None:
    from omegaconf import OmegaConf

    OmegaConf.save(to_composed(), tmp_path / "config.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        evaluate(words)
    assert f"error: {message}" in capsys.readouterr().err


# --- configuration ---


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optim=adamw", "optim.nesterov=true"],
            "optim.nesterov: expected null for adamw, which has the options weight_decay, ",
        ),
        (
            ["optim.betas=[0.9,0.99]"],
            "optim.betas: expected null for sgd, which has the options momentum",
        ),
        (["optim=adam", "optim.betas=[0.9,1.0]"], "optim.betas: expected null or a list of two numbers >= 0 and < 1, got"),
        (["optim.momentum=1.5"], "optim.momentum: expected null or a number >= 0 and < 1, got 1.5"),
        (["optim.weight_decay=-1"], "optim.weight_decay: expected null or a number >= 0, got -1.0"),
        (
            ["schedule=cosine", "schedule.gamma=0.1"],
            "schedule.gamma: expected null for cosine, which has the options",
        ),
        (["optim.scaling=big"], "optim.scaling: expected goyal or none, got big"),
        (["optim.clip=1", "optim.clip_scope=global"], "optim.clip_scope: expected stage with method.delay=2"),
        (["trainer.loss_scale=8"], "trainer.loss_scale: expected null with trainer.precision=float32, got 8"),
        (["trainer.label_smoothing=1"], "trainer.label_smoothing: expected a number >= 0 and < 1, got 1.0"),
        (["trainer.limit_batches=0"], "trainer.limit_batches: expected null or an integer >= 1, got 0"),
        (["trainer.compile=fast"], "trainer.compile: expected null, eager, aot_eager, inductor, "),
        (["trainer.export=onnx"], "trainer.export: expected none, pt or safetensors, got onnx"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_settings_that_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        planned(*overrides)


ROWS = re.findall(r"\| `(experiment=[^`]*)` \|", (ROOT / "docs" / "experiments.md").read_text())


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_the_papers_composes_and_plans(row: str) -> None:
    config = to_config(to_composed(*row.split()))
    set_up(config, ALONE)


def test_every_preset_has_a_row() -> None:
    presets = set(purposes("experiment"))
    presets -= {name for name in presets if name.startswith("inplace_abn/")}  # compared with the paper in test_abn_presets.py
    assert presets <= {row.split()[0].removeprefix("experiment=") for row in ROWS}
    recipe = to_config(to_composed("experiment=revnet/cifar10"))
    assert (recipe.optim.scaling, recipe.optim.nesterov, recipe.schedule.milestones) == ("none", False, [80, 120])
    set_up(recipe, ALONE)


@pytest.mark.parametrize("keep", ["nothing", "[input,graph,nothing,nothing,input,graph,input,nothing,graph,graph]"])
def test_the_stage_map_tells_what_the_pipeline_does(keep: str) -> None:
    setup = planned("model.width=0.0625", "trainer.stages=4", f"method.keep={keep}")
    rows, pipeline = stage_rows(setup.plan), setup.pipeline(setup.learning_rate(1))
    assert sum(row.stage.parameters for row in rows) == sum(p.numel() for p in setup.plan.model.build(0).parameters())
    assert [row.stage.delay for row in rows] == list(pipeline.plan.delays)
    assert [row.stage.keeps for row in rows] == [tuple(r.keep for r in pipeline.stages[j].runners) for j in range(4)]
    text = stage_map(setup)
    assert text.startswith("revnet18 on digits by petra (d = 2, k = 4): 4 stages in 1 process(es), ")
    assert len(text.splitlines()) == 2 + 2 + 4


def test_a_dry_run_prints_and_leaves_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run(to_config(to_composed(*TINY, "dry_run=true")), ALONE)
    assert "| stage |" in capsys.readouterr().out.replace("  ", " ")
    assert not list(tmp_path.iterdir())


def test_help_names_groups_and_examples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from launch.config.compose import compose_command_line

    monkeypatch.setattr(sys, "argv", ["launch.train", "--help"])
    with pytest.raises(SystemExit):
        compose_command_line()
    text = capsys.readouterr().out
    for part in ("petra train", "optim: adam, adamw, basis_rotation, lars, muon, nadam, sgd", "dry_run=true", "warmup_epochs: 5"):
        assert part in text
