"""What staleness cost in the benchmarks: the recommendation of petra plan, and the line of petra train."""

import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import vision
from benchmarks.records import RECORDS
from launch.config.compose import compose_overrides
from launch.plan import COMPARED, Candidate, main, recommend
from launch.run.expected import Expected, Setting, expected, note, setting_of
from launch.run.folder import records_in
from launch.runtime.rank import Process
from petra import METHODS, Keep, Weights
from petra.cost_model.autotune import Tuned
from tests.structure import ROOT
from tests.support.commands import planned, refused

pytestmark = pytest.mark.usefixtures("shared_profiles")

SMALL = ["model=revnet18", "model.width=0.0625", "data=synthetic", "data.batch_size=2"]


def test_methods_for_comparison_are_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest that fit are PipeDream's. With less memory, nothing is recommended, which is an error after the table."""
    main(["--devices", "10", "--memory", "0.17", "--bandwidth", "1000", *SMALL, "k=16", "data.batch_size=256"])
    out = capsys.readouterr().out
    rows = re.findall(r"^\| (\S[^|]*?) +\|", out, re.MULTILINE)
    assert {"pipedream", "pipedream_2bw"} <= {*rows} & {*COMPARED}
    assert re.search(r"- 1f1b: memory: expected at least .* GB", out)
    *late, exact = re.findall(r"recommended: (.*)", out)
    assert exact == "method=1f1b method.keep=input", "no graphs fit"
    assert len(late) <= 1, "the fastest of its kind"
    assert all(row.startswith(("method=petra ", "method=dsp ")) for row in late), "no method that is for comparison only"
    rows = [candidate(name, period, stale) for name, period, stale in (("delayed", 1.0, 2), ("gpipe", 1.0, 0), ("petra", 1.1, 2))]
    assert [(reason, row.method.name) for reason, row in recommend(rows).items()] == [("by throughput, late gradients", "petra")]
    rows.append(candidate("1f1b", 1.5, 0))
    assert [row.method.name for row in recommend(rows).values()] == ["petra", "1f1b"], "the fastest of each kind"
    rows.append(candidate("reversible", 1.12, 0))
    assert [row.method.name for row in recommend(rows).values()] == ["reversible"], "nearly as fast, and exact"
    assert recommend(rows[:2]) == {}
    with redirect_stdout(StringIO()) as printed:
        error = refused(main, ["--devices", "4", "--memory", "0.001", *SMALL], silent=False)
    assert error.startswith("--devices, --memory: expected devices that one of the recommended methods fits, got none")
    assert printed


def candidate(name: str, period: float, staleness: float, updates: float | None = None) -> Candidate:
    prediction: Any = SimpleNamespace(period=period, staleness=(staleness,))
    memory: Any = (SimpleNamespace(total=1),)
    known = None if updates is None else Expected(0, 0, 0, updates)
    return Candidate(METHODS[name], Tuned((1,), 2, (), ()), prediction, 0, 0.0, memory, 1.0, known)


def test_the_recommendation_goes_by_the_time_to_a_loss_where_it_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [candidate("petra", 1.0, 2, 60), candidate("dsp", 1.0, 2, 50), candidate("1f1b", 1.4, 0, 40), candidate("paci", 0.1, 1)]
    assert {reason: row.method.name for reason, row in recommend(rows).items()} == {
        "by time to a training loss (89% of that with exact gradients)": "dsp"
    }
    text = ["--devices", "8", "experiment=text_short", "trainer.stages=null", "optim=muon", "k=8", "trainer.device=cpu"]
    main(text)
    out = capsys.readouterr().out
    assert re.search(r"\| petra +\| 2 +\|", out)
    assert "not known here" in out, "without data.root, the length of the run is not known"
    assert "loss above exact: measured" not in out
    monkeypatch.setattr("launch.plan._samples", lambda setup: 0.5e6)
    main(text)
    out = capsys.readouterr().out
    above = {line.split("|")[1].strip(): line.split("|")[6].strip() for line in out.splitlines() if line.startswith("| ")}
    assert (above["petra"], above["delayed"], above["1f1b"]) == ("2.7 ± 1 %", "not known here", "0"), "1.1 at 0.94, 3.0 at 1.88"
    assert "chosen by time to a training loss (" in out
    main([*text, "model.dim=384"])
    assert "loss above exact: measured" not in capsys.readouterr().out, "a larger network than the benchmark's"


def test_the_loss_above_exact_gradients_is_on_a_line_between_measured_cells() -> None:
    muon = Setting("text", Keep.NOTHING, Weights.CURRENT, "muon", "none")
    low, high = (expected(muon, staleness) for staleness in (1.875, 3.75))
    assert low is not None
    assert high is not None
    assert expected(muon, 2.8125).above == pytest.approx((low.above + high.above) / 2)  # type: ignore[union-attr]
    assert (round(low.above), round(high.above)) == (3, 5)
    assert expected(muon, 0.0).loss == pytest.approx(2.247)  # type: ignore[union-attr]
    assert expected(muon, 7.6) is None
    assert expected(replace(muon, optimizer="sgd"), 1.0) is None
    assert expected(None, 1.0) is None


def test_the_preset_for_text_is_the_run_whose_loss_it_names() -> None:
    words = "experiment=lm_parity method=petra optim=muon remedy=feedback optim.lr=6e-3 k=16 data.batch_size=1"
    assert compose_overrides(["experiment=petra/text"]) == compose_overrides(
        [*words.split(), "trainer.stages=8", "trainer.epochs=2"]
    )
    name = "lm_long_petra__small_microbatches__Muon__error_feedback_6e-3"
    record, exact = (records_in(RECORDS / "language_models.jsonl")[each] for each in (name, "lm_long_backprop__Muon_6e-3"))
    text = (ROOT / "conf/experiment/petra/text.yaml").read_text()
    losses = [f"{each['summary']['test_loss']:.3f}" for each in (record, exact)]
    assert re.findall(r"\d\.\d{3}", text) == losses
    assert (record["k"], record["batch_size"], record["stages"], record["epochs"]) == (16, 1, 8, 2)


def test_the_preset_for_images_is_the_benchmarks_best_late_setting() -> None:
    """Both means are in its text, and no other setting with late gradients that has as many seeds is better."""
    config, text = compose_overrides(["experiment=petra/images"]), (ROOT / "conf/experiment/petra/images.yaml").read_text()
    final = vision.grouped([*records_in(RECORDS / "vision.jsonl").values()], final=True)
    own = final[vision.Setting("petra", "muon", remedy="feedback")]
    found = config.optim.lr, config.k, config.data.batch_size, config.trainer.epochs, config.model.options["width"]
    assert found == (own[0]["rate"], vision.K, vision.BATCH, vision.EPOCHS, vision.WIDTH)
    chosen = config.method.name, config.method.delay, config.optim.name.lower(), config.optim.options["filters"], config.remedy.name
    assert chosen == ("petra", 2, "muon", True, "feedback=1.0")
    means = {setting: 100 * fmean(row["test"] for row in rows) for setting, rows in final.items() if len(rows) >= 3}
    best, exact = vision.Setting("petra", "muon", remedy="feedback"), vision.Setting("backprop", "muon")
    assert max((setting for setting in means if setting.method.startswith("petra")), key=means.__getitem__) == best
    assert re.findall(r"\d\d\.\d\d %", text) == [f"{means[setting]:.2f} %" for setting in (best, exact)]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ("model=revgpt data=text optim=adamw k=2", "note: staleness of 7 updates with adamw. In the benchmark (text, "),
        ("model=gpt data=text optim=adamw k=2", "; optim=muon: 6.8 ± 0.7 % (docs/what_to_set.md)"),
        ("data=cifar10 model=revnet18 k=2", "), 4.5 updates, the most that was measured, ended 2.7 ± 0.2 points above exact"),
        (
            "data=cifar10 model=revnet18 k=2",
            "; optim=muon optim.filters=true remedy=feedback: 0.66 ± 0.2 points (docs/what_to_set.md)",
        ),
        (
            "data=cifar10 model=revnet18 k=4",
            "; optim=muon optim.filters=true remedy=feedback: 0.66 ± 0.2 points (docs/what_to_set.md)",
        ),
        (
            "data=cifar10 model=revnet18 method.delay=1 k=2",
            "; optim=muon optim.filters=true remedy=feedback: 0.66 ± 0.2 points (docs/what_to_set.md)",
        ),
        (
            "model=gpt data=text optim=adamw method=pipedream_2bw k=8",
            "with adamw. In the benchmark (text, 0.7 million parameters, ",
        ),
        ("model=gpt data=text optim=adamw method=pipedream_2bw k=8", "; optim=muon: 3.9 ± 0.9 % (docs/what_to_set.md)"),
        ("data=cifar10 model=revnet18 k=2 method=1f1b", ""),
        ("data=cifar10 model=revnet18 method.delay=1 k=4", ""),
        ("data=cifar10 model=revnet18 k=2 optim=adam", ""),
        ("data=cifar10 model=revnet18 k=2 optim=muon", ""),  # without filters, AdamW updates most weights
        ("model=revgpt data=text optim=muon remedy=feedback k=16", ""),
        ("model=revgpt data=text optim=adamw k=2 trainer.message_format=int8", "note: staleness of 7 updates with adamw."),
        ("model=revgpt data=text optim=adamw k=2 trainer.gradient_format=int4", ""),
        ("model=revgpt data=text optim=adamw k=2 model.stream=8", ""),
        ("model=revgpt data=text optim=adamw k=2 outer=diloco outer.every=2", ""),
        ("model=revgpt data=text optim=muon remedy.feedback=1 k=2", "note: staleness of 7 updates with muon and feedback=1.0."),
        (f"model=revgpt data=text optim=muon k=2 method.keep=[{'graph,' * 7}graph]", "note: staleness of 7 updates with muon."),
        (f"model=revgpt data=text optim=muon k=2 method.keep=[{'graph,' * 7}input]", ""),
    ],
)
def test_a_run_is_told_what_its_staleness_cost_in_the_benchmark(settings: str, line: str) -> None:
    own = ["model.dim=32", "model.depth=6", "model.heads=2"] if "data=text" in settings else ["model.width=0.0625"]
    found = note(planned(*settings.split(), *own))
    assert len(found) == bool(line)
    assert not line or line in found[0]


def test_what_a_note_recommends_is_possible() -> None:
    """Each replica has a row of the smaller microbatches, and divided optimizer state excludes remedies."""
    small = ["model=revgpt", "model.dim=32", "model.depth=6", "model.heads=2", "data=text", "k=2", "trainer.stages=8", "dp=2"]
    for others, better in (
        ("data.batch_size=2 optim=adamw", "optim=muon remedy=prediction_difference: "),
        ("data.batch_size=2 optim=adamw optim.shard=true", "optim=muon: "),
        ("data.batch_size=4 optim=muon method.delay=1", "remedy=feedback k=4 data.batch_size=2: "),
        ("data.batch_size=2 optim=muon method.delay=1", ""),
    ):
        (line,) = note(planned(*small, *others.split(), place=Process(0, 4, 0, 4)))
        assert f"; {better}" in line if better else ";" not in line


def test_what_was_measured_with_all_weights_is_not_said_of_lora() -> None:
    whole = planned("model=revgpt", "model.dim=32", "model.depth=6", "model.heads=2", "data=text")
    model = replace(whole.config.model, options={**whole.config.model.options, "lora": 2})
    assert setting_of(whole, METHODS["dsp"]) is not None
    assert setting_of(replace(whole, config=replace(whole.config, model=model)), METHODS["dsp"]) is None
