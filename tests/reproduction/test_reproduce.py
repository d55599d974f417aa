"""Test reproductions: which finished runs a table uses, what is trained, the tables, and the errors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.run.folder import as_data
from launch.run.jobs import Job
from launch.run.training import run
from launch.runtime.rank import Process
from petra.errors import ConfigError
from petra.models import revnet50
from reproduction import accuracy, memory, runs, speed
from reproduction import command as reproduce
from reproduction.record import record_of, write_record
from reproduction.report import Request, Scale
from reproduction.targets import TARGETS

TINY = ["data=synthetic", "data.images=16", "data.batch_size=8", "model.width=0.0625", "trainer.epochs=1", "trainer.device=cpu"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train runs in this process instead of new ones. Return the list of the folder names of trained runs."""
    names: list[str] = []

    def train_jobs(unfinished: Sequence[Job], processes: int) -> list[Job]:
        for job in unfinished:
            names.append(job.folder.name)
            run(job.config, Process(rank=0, world=1, local_rank=0, local_world=1))
        return []

    monkeypatch.setattr(runs, "train_jobs", train_jobs)
    return names


def write_run(folder: Path, config: dict[str, Any], test_accuracy: float, **summary: Any) -> None:
    """Write the files of a finished run."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    row = {
        "epoch": 1,
        "microbatches": 100,
        "train_loss": 1.0,
        "train_accuracy": 0.5,
        "test_loss": 1.0,
        "test_accuracy": test_accuracy,
    }
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    content = {"test_accuracy": test_accuracy, "train_accuracy": 0.5, "stages": 10, "k": config["k"], "parameters": 700_000}
    content |= {"method": config["method"]["name"], "delay": config["method"]["delay"], "seed": config["seed"]}
    content |= {"batch_size": config["data"]["batch_size"], "epochs": config["trainer"]["epochs"], "model_options": {}}
    content |= {"remedy": config["remedy"]["name"]}
    content |= {group: config[group]["_target_"].rpartition(".")[2] for group in ("model", "data")}
    (folder / "summary.json").write_text(json.dumps(content | summary))


@cache
def composed(*overrides: str) -> dict[str, Any]:
    return as_data(runs.job(Request(Scale.CPU, Path("out")), "x", *overrides).config)


def config_of(*overrides: str) -> dict[str, Any]:
    return deepcopy(composed(*overrides))


def request(out: Path, *arguments: str) -> None:
    reproduce.main([*arguments, "--out", str(out)])


def test_a_run_is_used_if_it_computes_the_same() -> None:
    wanted = config_of(*accuracy.SIX_EPOCHS, "k=1", "method=dsp")
    assert runs.same_results(config_of(*accuracy.SIX_EPOCHS, "k=1", "method=dsp", "data.root=/other", "trainer.threads=2"), wanted)
    assert runs.same_results(config_of(*accuracy.SIX_EPOCHS, "k=1", "method=dsp", "trainer.diagnose=7", "model.stem=cifar"), wanted)
    for other in ("k=2", "method=petra", "trainer.epochs=7", "trainer.precision=float32", "remedy=feedback"):
        assert not runs.same_results(config_of(*accuracy.SIX_EPOCHS, "k=1", "method=dsp", other), wanted), other
    diagnosed = config_of(*accuracy.SIX_EPOCHS, "k=1", "method=dsp", "trainer.diagnose=7")
    assert not runs.same_results(wanted, diagnosed)
    own = config_of(*accuracy.SIX_EPOCHS, "k=1", "method=dsp")
    own["model"]["_target_"] = "mine.network"
    assert not runs.same_results(own, wanted)


def test_a_record_is_found_by_its_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of settings, not keys of the configuration, say which run is which. Another recipe needs another record."""
    monkeypatch.setattr(accuracy, "ACCUMULATIONS", (4, 8))
    write_run(tmp_path / "run", config_of(*accuracy.SIX_EPOCHS, "k=4"), 0.7)
    record = record_of(tmp_path / "run", "k4_petra", "755bbe8", "B", also=["k8_petra"])
    write_record(tmp_path / "records", record)
    shutil.rmtree(tmp_path / "run")
    given = ("--gather", "--runs", str(tmp_path / "records"))
    request(tmp_path / "out", "fig4", "data.root=x", "trainer.threads=2", *given)
    text = capsys.readouterr().out
    assert "| 4 | 70.00 % |  |  | 4.5 |" in text
    assert "| 8 | 70.00 % |  |  | 2.25 |" in text
    for override in ("scale=paper", "trainer.epochs=7", "++optim.lr=1", "trainer.diagnose=7"):
        request(tmp_path / "out", "fig4", override, *given)
        assert "0 of 4 runs finished" in capsys.readouterr().out, override


def test_figures_of_gradients_share_a_run(tmp_path: Path, trained: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    diagnosed = [*TINY, "trainer.diagnose=1"]
    for target in ("fig5", "fig6"):
        request(tmp_path, target, *diagnosed)
    assert trained == ["gradients_petra"]
    text, rows = capsys.readouterr().out, json.loads((tmp_path / "fig6.json").read_text())["data"]["epochs"]
    assert len(re.findall(r"^\| \d+ \|", text, re.MULTILINE)) == 10 + 4 * 3
    assert {stage: list(epochs) for stage, epochs in rows.items()} == {str(stage): ["1"] for stage in range(1, 11)}
    assert re.search(r"^\| 175 \| 1 \| PETRA to delayed \| [\d.]+ \|", text, re.MULTILINE)
    assert {path.name for path in tmp_path.iterdir()} == {
        "runs",
        *(f"fig{n}.{kind}" for n in (5, 6) for kind in ("md", "json", "png")),
    }
    with pytest.raises(SystemExit):
        request(tmp_path, "fig5", *diagnosed, "k=2")
    error = capsys.readouterr().err
    assert error.startswith("error: --out: expected a new folder, got ")
    assert "a finished run with another k" in error


def test_table_3_matches_the_paper() -> None:
    model = revnet50(classes=1000, stem="imagenet")
    found = {row: sum(stages) for row, stages in memory.totals_of_table3(model, memory.IMAGENET).items()}
    assert [round(value / 1e9, 1) for value in found.values()] == [44.5, 43.6, 21.2, 20.3]
    first, *others = found.values()
    assert [round(100 * (1 - value / first), 1) for value in others] == [2.0, 52.3, 54.3]


def test_iteration_time_from_a_trace(tmp_path: Path) -> None:
    """From the end of the backward of microbatch 499 to that of 549, at the first stage."""
    events = [
        {"cat": kind, "tid": stage, "ts": 1000.0 * m * (stage + 1), "dur": 7.0, "args": {"microbatch": m}}
        for m in range(550)
        for stage in (0, 1)
        for kind in ("F", "B")
    ]
    run = runs.Run(tmp_path, {}, [])
    with pytest.raises(ConfigError, match=r"--runs: expected runs with trainer.trace=550 or more, got .* without the backwards"):
        speed.iteration_milliseconds(run)
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [{"name": "thread_name", "ph": "M"}, *events]}))
    assert speed.iteration_milliseconds(run) == pytest.approx(1.0)


def test_all_targets_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    some = {name: TARGETS[name] for name in ("table3", "table4", "fig5", "revnet-table2")}
    monkeypatch.setattr(reproduce, "TARGETS", some)
    page = tmp_path / "page.md"
    page.write_text(f"# Mine\n\n{reproduce.BEGIN}\nold\n{reproduce.END}\nrest\n")
    request(tmp_path / "out", "all", "--gather", "--page", str(page), "data.root=x")
    text = page.read_text()
    assert text.startswith("# Mine\n")
    assert text.endswith(f"{reproduce.END}\nrest\n")
    assert "old" not in text
    titles = re.findall(r"^### (.*)", text, re.MULTILINE)
    assert titles == [target.title for target in some.values()]
    assert "| no | no | 20.3 | 54.3 | 20.33 | 54.3 |" in text
    assert "0 of 15 runs finished" in text
    assert "Not run: --gather: expected a finished run with these settings" in text

    page.write_text(text.replace("20.33", "old").replace("0 of 15 runs finished", "kept"))
    request(tmp_path / "out", "table3", "--page", str(page))
    assert page.read_text() == text.replace("0 of 15 runs finished", "kept")

    page.write_text("# Mine\n")
    with pytest.raises(SystemExit):
        request(tmp_path / "out", "all", "--gather", "--page", str(page))
    assert "--page: expected a file with the lines" in capsys.readouterr().err


@pytest.mark.parametrize(
    "target",
    [
        *("table2", "table4", "fig4", "fig5", "fig6"),
        *("revnet-table3", "revnet-table4", "revnet-fig3", "revnet-fig4", "revnet-partitions"),
    ],
)
def test_page_of_results_has_the_figures_of_the_records(tmp_path: Path, target: str) -> None:
    folder = Path(__file__).parents[2] / "reproduction"
    page = tmp_path / "results.md"
    shutil.copy(folder / page.name, page)
    request(tmp_path / "out", target, "--gather", "--runs", str(folder / "records"), "--page", str(page))
    assert page.read_text() == (folder / page.name).read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["table2", "scale=paper"], "scale: expected cpu (backprop of a ResNet-18"),
        (["table3", "k=2"], "command line: expected only scale=... with table3, which trains nothing, got k=2"),
        (["fig4"], "data.root: expected a path to the files of cifar10, got none; download cifar-10-python.tar.gz"),
        (
            ["fig4", "--runs", ".", "data.root=."],
            "--runs: expected existing folders (key=value goes before --runs), got data.root=.",
        ),
        (
            ["fig5", "--gather"],
            "--gather: expected a finished run with these settings and trainer.diagnose in --out or",
        ),
    ],
)
def test_invalid_requests_end_with_one_line(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        request(tmp_path / "out", *arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {reason}")
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert not (tmp_path / "out").exists()
