"""Reproductions and records: which finished runs a table uses, what is trained, the tables, and the errors."""

import json
import re
import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.records import RECORDS, merge
from launch.compare import main as compare
from launch.config.compose import compose_overrides
from launch.run import training
from launch.run.folder import FORMAT, as_data, rows_of
from petra.errors import ConfigError, DataError
from petra.models import revnet50
from reproduction import accuracy, memory, runs
from reproduction import command as reproduce
from reproduction.jobs import Job
from reproduction.record import read_records, record_of, write_record
from reproduction.report import Request, Scale
from reproduction.targets import TARGETS
from tests.support.commands import ALONE, refused

TINY = ["data=synthetic", "data.images=16", "data.batch_size=8", "model.width=0.0625", "trainer.epochs=1", "trainer.device=cpu"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train runs in this process instead of new ones. Return the list of the folder names of trained runs."""
    names: list[str] = []

    def train_jobs(unfinished: Sequence[Job], processes: int) -> list[Job]:
        for job in unfinished:
            names.append(job.folder.name)
            training.run(job.config, ALONE)
        return []

    monkeypatch.setattr(runs, "train_jobs", train_jobs)
    return names


def write_run(folder: Path, config: dict[str, Any], test_accuracy: float, **summary: Any) -> None:
    """Write the files of a finished run."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    row = {"epoch": 1, "microbatches": 100, "train_loss": 1.0, "train_accuracy": 0.5, "test_loss": 1.0}
    row |= {"test_accuracy": test_accuracy}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    content = {"test_accuracy": test_accuracy, "train_accuracy": 0.5, "stages": 10, "k": config["k"], "parameters": 700_000}
    content |= {"method": config["method"]["name"], "delay": config["method"]["delay"], "seed": config["seed"]}
    content |= {"batch_size": config["data"]["batch_size"], "epochs": config["trainer"]["epochs"], "model_options": {}}
    content |= {"remedy": "none"}
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
    dsp = (*accuracy.SIX_EPOCHS, "k=1", "method=dsp")
    wanted, own, diagnosed = config_of(*dsp), config_of(*dsp), config_of(*dsp, "trainer.diagnose=7")
    own["model"]["_target_"] = "mine.network"
    for others in (("data.root=/other", "trainer.timeout=2"), ("trainer.diagnose=7", "model.stem=cifar")):
        assert runs.same_results(config_of(*dsp, *others), wanted), others
    for other in ("k=2", "method=petra", "trainer.epochs=7", "trainer.precision=float32", "remedy=feedback"):
        assert not runs.same_results(config_of(*dsp, other), wanted), other
    assert not runs.same_results(wanted, diagnosed)
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
    request(tmp_path / "out", "fig4", "data.root=x", "trainer.timeout=2", *given)
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
    assert len(re.findall(r"^\| \d+ \|", capsys.readouterr().out, re.MULTILINE)) == 10 + 4 * 3
    assert {path.name for path in tmp_path.iterdir()} == {
        "runs",
        *(f"fig{n}.{kind}" for n in (5, 6) for kind in ("md", "json", "png")),
    }


@pytest.mark.parametrize("name", ["plain", "two words", "it's", 'say "a"', "x=1,2"])
def test_folders_are_quoted_for_hydra(name: str) -> None:
    assert compose_overrides(Job((), Path("/out") / name).command()).run_dir == f"/out/{name}"


def test_a_finished_run_with_another_configuration_is_not_replaced(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"format": FORMAT, **config_of("k=8")}, 0.5, microbatches=100, test_loss=1.0)
    with pytest.raises(ConfigError, match=r"--out: expected a new folder, got .*, a finished run with another k"):
        Job(("k=4",), tmp_path / "run").check(1)


def test_table_3_matches_the_paper() -> None:
    model = revnet50(classes=1000, stem="imagenet")
    found = {row: sum(stages) for row, stages in memory.totals_of_table3(model, memory.IMAGENET).items()}
    assert [round(value / 1e9, 1) for value in found.values()] == [44.5, 43.6, 21.2, 20.3]
    first, *others = found.values()
    assert [round(100 * (1 - value / first), 1) for value in others] == [2.0, 52.3, 54.3]


def test_all_targets_on_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


PAPERS = ["table2", "table4", "fig4", "fig5", "fig6", *(f"revnet-{n}" for n in ("table3", "table4", "fig3", "fig4", "partitions"))]


@pytest.mark.parametrize("target", PAPERS)
def test_page_of_results_has_the_figures_of_the_records(tmp_path: Path, target: str) -> None:
    folder = RECORDS.parent
    page = tmp_path / "papers.md"
    shutil.copy(folder / page.name, page)
    request(tmp_path / "out", target, "--gather", "--runs", str(RECORDS / "papers.jsonl"), "--page", str(page))
    assert page.read_text() == (folder / page.name).read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["fig4"], "data.root: expected a path to the files of cifar10, got none; download cifar-10-python.tar.gz"),
        (["fig5", "--gather"], "--gather: expected a finished run with these settings and trainer.diagnose in --out or"),
    ],
)
def test_invalid_requests_end_with_one_line(arguments: list[str], reason: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert refused(reproduce.main, [*arguments, "--out", str(tmp_path / "out")]).startswith(reason)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a finished run with 401 rows of updates and the gradients of two stages."""
    folder = tmp_path / "run"
    options = {"width": 0.25, "norm": "batchnorm"}
    config = config_of("method=petra", "k=4", "seed=3", "trainer.epochs=1")
    write_run(folder, config, 0.7, model_options=options, layout=[{"stage": 1}], microbatches=100, test_loss=1.0)
    row = json.loads((folder / "metrics.jsonl").read_text()) | {"stage/1/staleness": 4.5, "stage/2/staleness": 4.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    updates: list[dict[str, Any]] = [{"microbatches": 4 * n, "updates": n, "update/loss": float(n)} for n in range(1, 402)]
    updates[-1]["update/weight_drift"] = 0.5
    (folder / "updates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in updates))
    gradients = [{"microbatch": 0, "stage": stage, "reconstruction_error": 1 / 3} for stage in (2, 1)]
    (folder / "gradients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gradients))
    return folder


def test_every_setting_has_one_record() -> None:
    records = [record for name in ("papers", "language_models") for _, record in read_records(RECORDS / f"{name}.jsonl")]
    names = [(record.scale, name) for record in records for name in (record.setting, *record.also)]
    assert len(records) >= 53
    assert len({*names}) == len(names)


def test_the_folder_of_a_run_becomes_a_record(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_record(tmp_path, record_of(run, "mine_1.5e-3", "755bbe8", "B", scale="paper"))
    [(_, record)] = read_records(tmp_path)
    assert (record.setting, record.scale, record.commit, record.machine) == ("mine_1.5e-3", "paper", "755bbe8", "B")
    assert (record.method, record.delay, record.k, record.seed, record.optimizer) == ("petra", 2, 4, 3, "sgd")
    assert record.architecture == "width 0.25, norm batchnorm"
    assert record.summary == {"test_accuracy": 0.7, "train_accuracy": 0.5, "test_loss": 1.0, "microbatches": 100}
    assert record.curve["stage/1/staleness"] == [4.5]
    assert "stage/2/staleness" not in record.curve
    updates = rows_of(record.updates)
    assert len(updates) == 134
    assert updates[0] == {"microbatches": 12, "updates": 3, "update/loss": 2.0}
    assert updates[-1] == {"microbatches": 1604, "updates": 401, "update/loss": 400.5, "update/weight_drift": 0.5}
    assert record.gradients == {"microbatch": [0, 0], "stage": [2, 1], "reconstruction_error": [0.33333, 0.33333]}
    compare([str(path), str(run), "--out", str(tmp_path / "x.svg")])
    cells = "digits | petra | 2 | 4 | 1 of 1 | 1.0000 | 1.0000 | 70.00% | 70.00% |"
    assert f"| mine_1.5e-3 | {cells}" in capsys.readouterr().out
    assert (tmp_path / "x.svg").read_text().count("<svg") == 1
    write_record(tmp_path, replace(record, setting="other"))
    file = tmp_path / "all.jsonl"
    merge([tmp_path], file)
    assert dict(read_records(file)) == {file / "mine_1.5e-3": record, file / "other": replace(record, setting="other")}
    for chosen, names in ((file, ["mine_1.5e-3", "other"]), (file / "mine*", ["mine_1.5e-3"])):
        compare([str(chosen)])
        assert re.findall(r"^\| (\S+) \| digits", capsys.readouterr().out, re.MULTILINE) == names
    assert refused(compare, [str(file / "x*")]) == f"{file}/x*: expected the name of a record, with * for any text, got x*"


def test_what_is_no_record_is_refused(run: Path, tmp_path: Path) -> None:
    path = write_record(tmp_path, record_of(run, "mine", None, "B"))
    path.write_text(path.read_text().replace('"k"', '"j"'))
    with pytest.raises(DataError, match="expected a record, got another file"):
        [*read_records(tmp_path)]
    assert refused(compare, [str(path)]).startswith(f"{path}: expected the record of a run, got another file (")
    (run / "summary.json").unlink()
    with pytest.raises(DataError, match="expected the folder of a finished run"):
        record_of(run, "mine", None, "B")
