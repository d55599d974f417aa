"""Options of training: label smoothing, metrics, export and evaluation, presets, the dry run, inputs that are fetched again."""

import json
import re
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from torch.nn import functional as F

from launch.config.catalogue import configurations
from launch.config.compose import compose_overrides
from launch.evaluate import main as evaluate
from launch.run.costs import stage_facts, stage_map
from petra.engine.endpoints import Losses
from petra.training import sgd
from tests.structure import ROOT
from tests.support.commands import TINY, lines, planned, train
from tests.support.nets import RandomSource, make_pipeline, mixed_net

pytestmark = pytest.mark.usefixtures("shared_profiles")


def test_label_smoothing_is_for_training_only() -> None:
    data = RandomSource()
    smoothed = partial(F.cross_entropy, label_smoothing=0.3)
    losses = Losses(smoothed, F.cross_entropy)
    pipeline = make_pipeline(mixed_net(), data.spec, method="backprop", optimizer=sgd, learning_rate=lambda t: 0.0, loss=losses)
    plain = mixed_net().build(0)
    assert pipeline.train(data, 1).loss == pytest.approx(smoothed(plain(data.inputs(0)), data.targets(0)).item())
    plain.load_state_dict(pipeline.state_dict())
    assert pipeline.evaluate(data, 1).loss == pytest.approx(F.cross_entropy(plain.eval()(data.inputs(0)), data.targets(0)).item())


def test_a_remedy_for_late_gradients_warns_where_none_are_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("trainer.stages=3", "remedy=feedback", "trainer.limit_batches=2", "k=2")
    for method in ("petra", "1f1b"):
        train(*TINY, *settings, f"method={method}", f"run_dir={tmp_path / method}")
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: remedy"))
    assert warning == "warning: remedy: expected none with method=1f1b, whose gradients are exact; feedback=1.0 changes nothing"


def test_a_discount_of_less_than_a_microbatch_lasts_one() -> None:
    setup = planned(*TINY, "remedy.discount=0.001")
    assert [extension.discount for extension in setup.recipe(100).extensions] == [1]


def test_settings_without_effect_and_updates_that_nothing_has_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("trainer.stages=1", "trainer.gradient_format=int8", "trainer.limit_batches=7", "k=1")
    train(*TINY, *settings, "outer=streaming", "outer.every=4", "outer.overlap=1", f"run_dir={tmp_path / 'run'}")
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("warning: trainer", "warning: outer"))]
    which = "the last 2 of 7 updates of stage 1"
    assert found == [
        "warning: trainer.gradient_format: expected null, since this run sends nothing in it, got int8",
        "warning: outer.format: expected null, since this run sends nothing in it, got int8",
        f"warning: outer.every=4: {which} come after the last outer step, so the trained weights leave them out",
    ]


def test_a_run_exports_and_is_evaluated_to_its_own_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    settings = ("trainer.export=pt", "optim.average=0.9", "trainer.limit_batches=3", "trainer.stages=3", "logger=jsonl", "k=3")
    settings += ("method=dsp", "trainer.stored_format=int8")
    train(*TINY, f"run_dir={folder}", *settings)
    (row,) = lines(folder / "metrics.jsonl")
    assert row["microbatches"] == 3
    assert {f"stage/{j}/gradient_norm" for j in (1, 2, 3)} <= row.keys()
    assert all(row[f"stage/{j}/gradient_norm"] >= 0 for j in (1, 2, 3))
    assert {"train_top5", "test_top5", "train_accuracy", "images_per_second"} <= row.keys()
    out = capsys.readouterr().out
    assert "warning: schedule.warmup_epochs=5: expected less than trainer.epochs=1; the" in out
    assert "warning: schedule.milestones=[150, 225]: expected less than trainer.epochs=1; they are never reached" in out
    evaluate([f"{folder}", f"--weights={folder}/ema.pt", "trainer.stages=1"])  # where no block stores its input
    found = json.loads(capsys.readouterr().out)
    assert [found[key] for key in ("loss", "accuracy", "top5")] == [row[f"test_{key}"] for key in ("loss", "accuracy", "top5")]
    evaluate([f"{folder}", f"--weights={folder}/model.pt", "trainer.limit_batches=null"])
    assert json.loads(capsys.readouterr().out)["images"] == 16


def expanded(row: str) -> list[str]:
    """Return the arguments of each run of a row, in which commas separate those of several."""
    choices = [[f"{key}={value}" for value in values.split(",")] for key, values in (word.split("=") for word in row.split())]
    return [" ".join(words) for words in product(*choices)]


PAGE = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
ROWS = [run for row in re.findall(r"\| `(experiment=[^`]*)` \|", PAGE) for run in expanded(row)]


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_the_papers_composes_and_plans(row: str) -> None:
    if "model.path=" in row:  # of a checkpoint, which tests/huggingface has
        assert compose_overrides(row.split()).model.name == "huggingface"
    else:
        planned(*row.split())


def test_every_preset_has_a_row() -> None:
    presets = set(configurations("experiment"))
    presets -= {name for name in presets if name.startswith("inplace_abn/")}  # compared with the paper in test_recipes.py
    assert presets <= {row.split()[0].removeprefix("experiment=") for row in ROWS}


def test_the_stage_map_tells_what_the_pipeline_does() -> None:
    keep = "[input,graph,nothing,nothing,input,graph,input,nothing,graph,graph]"
    setup = planned("model.width=0.0625", "trainer.stages=4", f"method.keep={keep}")
    stages, pipeline = stage_facts(setup.plan), setup.pipeline()
    assert sum(stage["parameters"] for stage in stages) == sum(p.numel() for p in setup.plan.model.build(0).parameters())
    assert [stage["delay"] for stage in stages] == list(pipeline.plan.delays)
    kept = [Counter(str(runner.keep) for runner in pipeline.stages[j].runners) for j in range(4)]
    assert [stage["stores"] for stage in stages] == [
        ", ".join(f"{n} {keep}" if len(counts) > 1 else keep for keep, n in counts.items()) for counts in kept
    ]
    text = stage_map(setup)
    assert text.startswith("revnet18 on digits by petra (d = 2, k = 4): 4 stages in 1 process(es), ")
    assert len(text.splitlines()) == 2 + 2 + 4
    assert "provisional" not in text
    automatic = stage_map(planned("model.width=0.0625", "trainer.stages=auto", "method.delay=auto"))
    assert automatic.splitlines()[0].endswith("; provisional delay, stages, which the run chooses (auto)")


def test_a_dry_run_prints_and_leaves_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    train(*TINY, "dry_run=true")
    assert "| stage |" in capsys.readouterr().out.replace("  ", " ")
    assert not list(tmp_path.iterdir())


def test_inputs_are_fetched_again_from_data_sets_in_memory_unless_the_configuration_decides() -> None:
    """With one microbatch in flight, as with ``reversible``, there is nothing to fetch again."""
    for overrides in ("data=cifar10", "data=imagenet data.refetch=true", "method=dsp", "method=pipedream model=resnet18"):
        assert planned(*overrides.split()).plan.refetches, overrides
    for overrides in ("data=imagenet", "data=cifar10 data.refetch=false", "method=backprop", "method=reversible"):
        assert not planned(*overrides.split()).plan.refetches, overrides
