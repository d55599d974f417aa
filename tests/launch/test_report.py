"""Reports and comparisons of runs from their folders, and the records that they are made from."""

import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launch.compare import RECORDED
from launch.compare import main as compare
from launch.report import main as report
from petra.analysis.plots import curve_panels
from petra.errors import Interrupted
from petra.training import Trainer
from tests.support import commands
from tests.support.commands import TINY, lines, refused

pytestmark = pytest.mark.usefixtures("shared_profiles")


def train(folder: Path, *overrides: str) -> None:
    commands.train(*TINY, f"run_dir={folder}", *overrides)


def headings(text: str) -> list[str]:
    return re.findall(r"<h[12][^>]*>(.*?)</h[12]>", text)


def test_a_run_of_one_epoch_leaves_curves_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    recorded = ("trainer.trace=4", "trainer.stage_metrics=true", "trainer.diagnose=4", "trainer.log_every=2")
    train(folder, "trainer.stages=3", "k=2", *recorded)
    updates = lines(folder / "updates.jsonl")
    assert [(row["microbatches"], row["updates"]) for row in updates] == [(4, 2), (8, 4)]
    (epoch,) = lines(folder / "metrics.jsonl")
    assert sum(row["update/loss"] for row in updates) / 2 == pytest.approx(epoch["train_loss"])
    assert sum(row["update/accuracy"] for row in updates) / 2 == pytest.approx(epoch["train_accuracy"])
    layout = json.loads((folder / "summary.json").read_text())["layout"]
    assert [(stage["stage"], stage["processes"], stage["delay"]) for stage in layout] == [(1, [0], 4), (2, [0], 2), (3, [0], 0)]
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert headings(text) == ["run", "Curves", "Stages and staleness", "Timeline", "Gradient quality"]
    assert not re.search(r'(?:href|src)="(?!#)', text), "the page is one file"
    assert "<script" not in text
    assert not re.search(r"\d,\d{3},\d{3}", text), "FLOPs are short"
    assert f"{epoch['test_accuracy']:.2%}" in text
    (folder / "report.html").unlink()
    capsys.readouterr()
    report([str(folder)])
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    assert (folder / "report.html").read_text(encoding="utf-8") == text
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"peak_memory_bytes": [1e6, 2e6]}))  # of two processes
    report([str(folder)])
    assert "Memory" in headings((folder / "report.html").read_text(encoding="utf-8"))
    kept = {name: (folder / name).read_bytes() for name in ("trace.json", "gradients.jsonl")}
    train(folder, "trainer.stages=3", "k=2", *recorded, "resume=auto")  # stopped in the evaluation, it has nothing left to train
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    with (folder / "gradients.jsonl").open("a") as file:  # of a run that was killed after its checkpoint
        file.write(kept["gradients.jsonl"].decode().splitlines()[0].replace('"microbatch": ', '"microbatch": 99'))
    train(folder, "trainer.stages=3", "k=2", "resume=auto")
    assert (folder / "gradients.jsonl").read_bytes() == kept["gradients.jsonl"]


def test_a_run_that_is_not_complete_has_a_report(tmp_path: Path) -> None:
    row = {"epoch": 1, "microbatches": 8, "train_loss": 1.5, "test_loss": 1.25}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + '\n{"epoch": 2, "torn')
    (tmp_path / "config.yaml").write_text("a: </pre><b>")
    updates = "".join(f'{{"microbatches": {m}, "update/loss": 1}}\n' for m in range(10_000))
    (tmp_path / "updates.jsonl").write_text(updates)
    report([str(tmp_path)])
    text = (tmp_path / "report.html").read_text()
    assert "This run is not complete" in text
    assert "a: &lt;/pre&gt;&lt;b&gt;" in text
    assert len(text) < 60_000, "of long lines, only some points are drawn"
    assert headings(text) == [tmp_path.name, "Curves"]


def test_a_report_draws_what_was_measured_and_a_loss_far_above_the_others_does_not_flatten_the_curves(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"epoch": e, "microbatches": 8 * e, "train_loss": 2 / e, "train_accuracy": 0.3, "learning_rate": 0.1} for e in (1, 2, 3)
    ]
    for row, loss in zip(rows, (25.3, 1.9, 0.8), strict=True):
        row |= {"test_loss": loss, "test_accuracy": 0.2, "stage/1/skipped_updates": 0.0, "stage/1/weight_drift": None}
        row |= {"stage/1/gradient_norm": 0.5, "stage/1/staleness": 3.0}
    assert drawn(tmp_path, rows) == {"cross entropy (nats)", "accuracy (%)", "learning rate", "gradient norm"}
    assert "25.3" in labels(tmp_path)
    assert curve_panels({"": rows})[0].top == pytest.approx(2.1)
    assert curve_panels({"": rows[1:]})[0].top is None
    rows[0]["train_loss"] = float("nan")
    assert curve_panels({"": rows})[0].top == pytest.approx(1.05 * 1.9)


def test_one_epoch_shows_stages_beside_each_other(tmp_path: Path) -> None:
    stages = {f"stage/{j}/gradient_norm": 0.1 * j for j in (1, 2)}
    row = {"epoch": 1, "microbatches": 8, "train_loss": 1.5, "test_loss": 1.25, "learning_rate": 0.1, **stages}
    assert drawn(tmp_path, [row]) == {"cross entropy (nats)", "gradient norm"}
    assert {"stage", "1", "2"} <= labels(tmp_path)


def drawn(folder: Path, rows: list[dict[str, Any]]) -> set[str]:
    """Titles of the diagrams of a run's report."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report([str(folder)])
    titles = (
        "cross entropy (nats)",
        "accuracy (%)",
        "learning rate",
        "gradient norm",
        "skipped updates",
        "weight drift",
        "staleness",
    )
    return labels(folder) & {*titles}


def labels(folder: Path) -> set[str]:
    """Texts in the diagrams of a run's report."""
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", (folder / "report.html").read_text(encoding="utf-8")))


class Wandb(ModuleType):
    """Stands for the package wandb. Keeps what each run is told."""

    Image, Settings = Path, dict

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__, self.run, self.runs = ModuleSpec("wandb", None), None, list[Any]()

    def init(self, **options: Any) -> Any:
        rows: dict[int | None, dict[str, Any]] = {}

        def log(row: dict[str, Any], step: int | None = None) -> None:
            rows.setdefault(step, {}).update(row)

        self.runs.append(SimpleNamespace(**options, rows=rows, log=log, summary={}, finish=lambda: None))
        return self.runs[-1]


def test_a_resumed_run_is_the_same_run_of_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is stopped after 4 of 16 microbatches, and what it logged after its checkpoint is not repeated."""
    folder, wandb, save = tmp_path / "run", Wandb(), Trainer._save_and_stop
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    every = ("trainer.log_every=1", "checkpoint.every=4")
    options = ("logger=wandb", "trainer.stages=2", "k=2", *every, "trainer.epochs=2", "trainer.trace=2")

    def interrupted(self: Trainer, score: float | None) -> None:
        save(self, score)
        if self.pipeline.microbatches_done == 4:
            (folder / "updates.jsonl").open("a").write('{"microbatches": 6, "update/loss": 99}\n')
            raise Interrupted(4, saved=True)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_and_stop", interrupted)
        with pytest.raises(Interrupted):
            train(folder, *options)
    train(folder, *options, "resume=auto")
    first, resumed = wandb.runs
    assert resumed.id == first.id
    losses = {step: row["update/loss"] for step, row in resumed.rows.items() if "update/loss" in row}
    assert [*losses] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert list(losses.values()) == [row["update/loss"] for row in lines(folder / "updates.jsonl")]
    assert [step for step, row in resumed.rows.items() if "train_loss" in row] == [8, 16]
    assert "stage/2/gradient_norm" in resumed.rows[8]
    assert resumed.config["trainer"]["epochs"] == 2
    assert "pictures/timeline" in resumed.rows[None]
    assert resumed.summary["test_accuracy"] == json.loads((folder / "summary.json").read_text())["test_accuracy"]


GOOD = {"epoch": 1, "microbatches": 8, "train_loss": 1.5, "test_loss": 1.25, "test_accuracy": 0.5}
CONFIG = "format: 3\nmethod: {name: petra, delay: 2}\nk: 4\ntrainer: {epochs: 3}\ndata: {_target_: petra.data.digits}\n"


@pytest.mark.parametrize(
    ("metrics", "config", "out", "message"),
    [
        ("", CONFIG, "x.png", "runs: expected folders of runs with a finished epoch, got "),
        ('{"epoch": 1\n{}\n', CONFIG, "x.png", "metrics.jsonl: expected a JSON object in line 1, got '{\"epoch\": 1'"),
        (json.dumps(GOOD), None, "x.png", "config.yaml: can't be read ([Errno 2] No such file or directory"),
        (json.dumps(GOOD), CONFIG, "metrics.jsonl/x.png", "x.png: cannot be written (File exists)"),
    ],
)
def test_what_cannot_be_compared_is_one_line(metrics: str, config: str | None, out: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(metrics)
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    assert message in refused(compare, [str(tmp_path), "--out", str(tmp_path / out)], silent=False)


def test_a_run_is_compared_once_with_all_of_its_epochs(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(GOOD))
    (tmp_path / "config.yaml").write_text(CONFIG)
    twice = refused(compare, [str(tmp_path), f"{tmp_path}/"], silent=False)
    assert twice == f"command line: expected each run once, got {tmp_path} twice"
    (tmp_path / "summary.json").write_text(json.dumps({"microbatches": 16, "test_loss": 1.0}))
    assert "summary.json: expected the summary of metrics.jsonl, got another" in refused(compare, [str(tmp_path)], silent=False)


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ({"epoch": []}, "expected a finished epoch, got none"),
        ({"epoch": [1], "train_loss": [1.5], "test_loss": [None]}, "expected a number test_loss in line 1, got none"),
        ({"epoch": [1], "train_loss": ["x"], "test_loss": [1.5]}, "expected a number train_loss in line 1, got x"),
    ],
)
def test_a_damaged_record_is_one_line(curve: dict[str, Any], message: str, tmp_path: Path) -> None:
    record = dict.fromkeys(RECORDED, 1) | {"curve": curve, "updates": {}}
    (tmp_path / "a.record.json").write_text(json.dumps(record))
    assert message in refused(compare, [f"{tmp_path}/a.record.json"], silent=False)


@pytest.mark.parametrize("name", ["summary.json", "trace.json", "gradients.jsonl", "updates.jsonl"])
def test_a_damaged_file_is_named_by_the_report(name: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(GOOD))
    (tmp_path / name).write_text("{]\n{]\n")
    assert refused(report, [str(tmp_path)]).startswith(f"{tmp_path}/{name}: ")


def test_a_summary_of_another_program_is_named_by_the_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(GOOD))
    (tmp_path / "summary.json").write_text(json.dumps({"microbatches": 8, "test_loss": 1.25, "model": "mine"}))
    assert refused(report, [str(tmp_path)]).startswith(f"{tmp_path}/summary.json: expected the summary of a run, got another file")
