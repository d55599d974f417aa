"""Records of runs: those in reproduction/records are complete, and a run's folder becomes one that says the same."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launch.compare import main as compare
from launch.run.folder import RECORD, rows_of
from petra.errors import DataError
from reproduction.record import read_record, read_records, record_of, write_record
from tests.reproduction.test_reproduce import config_of, write_run

RECORDS = Path(__file__).parents[2] / "reproduction" / "records"
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("setting", "scale", "method", "remedy", "optimizer", "model", "architecture", "data", "machine"), (str,)),
    **dict.fromkeys(("k", "seed", "batch_size", "stages", "parameters", "epochs"), (int,)),
    **dict.fromkeys(("summary", "curve", "updates", "gradients"), (dict,)),
    **{"also": (list,), "delay": (int, list), "learning_rate": (float,), "commit": (str, type(None))},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a finished run with 401 rows of updates and the gradients of two stages."""
    folder = tmp_path / "run"
    options = {"width": 0.25, "norm": "batchnorm"}
    config = config_of("method=petra", "k=4", "seed=3", "trainer.epochs=1")
    write_run(folder, config, 0.7, model_options=options, layout=[{"stage": 1}])
    row = json.loads((folder / "metrics.jsonl").read_text()) | {"stage/1/staleness": 4.5, "stage/2/staleness": 4.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    updates: list[dict[str, Any]] = [{"microbatches": 4 * n, "updates": n, "update/loss": float(n)} for n in range(1, 402)]
    updates[-1]["update/weight_drift"] = 0.5
    (folder / "updates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in updates))
    gradients = [{"microbatch": 0, "stage": stage, "reconstruction_error": 1 / 3} for stage in (2, 1)]
    (folder / "gradients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gradients))
    return folder


@pytest.mark.parametrize("path", sorted(RECORDS.glob(f"*{RECORD}")), ids=lambda path: path.name)
def test_a_record_has_all_fields_with_their_types(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content.keys() == TYPES.keys()
    assert not {name: value for name, value in content.items() if type(value) not in TYPES[name]}
    assert path.name == content["setting"] + RECORD
    assert content["curve"]["epoch"] == [*range(1, content["epochs"] + 1)]
    assert not {"model_options", "layout"} & content["summary"].keys()
    record = read_record(path)
    for columns in (record.curve, record.updates, record.gradients):
        assert len({len(column) for column in columns.values()}) <= 1
        assert all(type(value) in (int, float, type(None)) for column in columns.values() for value in column)
    assert all(record.summary[name] == values[-1] for name, values in record.curve.items() if name.startswith("test_"))
    microbatches = record.updates.get("microbatches", [])
    assert all(a < b for a, b in pairwise(microbatches))  # type: ignore[operator]


def test_every_setting_has_one_record() -> None:
    records = [record for _, record in read_records(RECORDS)]
    names = [(record.scale, name) for record in records for name in (record.setting, *record.also)]
    assert len(records) >= 53
    assert len({*names}) == len(names)


def test_the_folder_of_a_run_becomes_a_record(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_record(tmp_path, record_of(run, "mine_1.5e-3", "755bbe8", "B", scale="paper"))
    record = read_record(path)
    assert [(path, record)] == [*read_records(tmp_path)]
    assert (record.setting, record.scale, record.commit, record.machine) == ("mine_1.5e-3", "paper", "755bbe8", "B")
    assert (record.method, record.delay, record.k, record.seed, record.optimizer) == ("petra", 2, 4, 3, "sgd")
    assert record.architecture == "width 0.25, norm batchnorm"
    assert record.summary == {"test_accuracy": 0.7, "train_accuracy": 0.5}
    assert record.curve["stage/1/staleness"] == [4.5]
    assert "stage/2/staleness" not in record.curve
    updates = rows_of(record.updates)
    assert len(updates) == 134
    assert updates[0] == {"microbatches": 12, "updates": 3, "update/loss": 2.0}
    assert updates[-1] == {"microbatches": 1604, "updates": 401, "update/loss": 400.5, "update/weight_drift": 0.5}
    assert record.gradients == {"microbatch": [0, 0], "stage": [2, 1], "reconstruction_error": [0.33333, 0.33333]}
    compare([str(path), str(run), "--out", str(tmp_path / "x.svg")])
    cells = "petra | 2 | 4 | 1 of 1 | 1.0000 | 1.0000 | 70.00% | 70.00% |"
    assert f"| mine_1.5e-3 | {cells}" in capsys.readouterr().out


def test_what_is_no_record_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_record(tmp_path, record_of(run, "mine", None, "B"))
    content = json.loads(path.read_text())
    lacking = {name: value for name, value in content.items() if name != "k"}
    for text in ("{", "[]", json.dumps(lacking), json.dumps(content | {"curve": {"epoch": [1], "test_loss": []}})):
        path.write_text(text)
        if "test_loss" not in text:
            with pytest.raises(DataError, match="expected a record, got another file"):
                read_record(path)
        with pytest.raises(SystemExit):
            compare([str(path)])
        assert capsys.readouterr().err.startswith(f"error: {path}: expected the record of a run, got another file (")
    (run / "summary.json").unlink()
    with pytest.raises(DataError, match="expected the folder of a finished run"):
        record_of(run, "mine", None, "B")
