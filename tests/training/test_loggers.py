"""Rows of updates, and what Weights & Biases reads from the files of a run."""

from collections.abc import Callable
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from petra.engine.recipe import Recipe
from petra.errors import ConfigError, DataError
from petra.training import JsonLines, Logger, UpdateMeans, read_rows, sgd
from tests.support.nets import RandomSource, make_pipeline, mixed_net


class Received(Logger):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, row: Any) -> None:
        self.rows.append(row)


def recipe(rate: Callable[[int], float] = lambda t: 0.1) -> Recipe:
    return make_pipeline(mixed_net(), RandomSource().spec, optimizer=sgd, learning_rate=rate).recipe


def test_rows_of_a_resumed_run_are_those_of_an_uninterrupted_one() -> None:
    """Some microbatches have no targets. An update without any has no loss."""
    reports = [torch.tensor([7 * (m > 5), 0.1 * m * (m > 5), m % 3], dtype=torch.float64) for m in range(12)]
    whole, parts = Received(), Received()
    log, first, second = (UpdateMeans(3, 2, recipe(lambda t: t / 10), [received]) for received in (whole, parts, parts))
    for m, one in enumerate(reports):
        log.microbatch(one)
        if m == 8:
            second.resume(first.state(), 8)
        (first if m < 8 else second).microbatch(one)
    assert parts.rows == whole.rows
    assert [row["update/loss"] for row in whole.rows] == [
        pytest.approx(nan, nan_ok=True),
        pytest.approx(0.1 * sum(range(6, 12)) / 42),
    ]
    assert [(row["microbatches"], row["updates"], row["update/learning_rate"]) for row in whole.rows] == [(6, 3, 0.6), (12, 6, 1.2)]
    assert whole.rows[1]["update/accuracy"] == pytest.approx(6 / 42)
    assert reports[6].tolist()[0] == 7, "reports belong to the pipeline"
    with pytest.raises(ConfigError, match=r"trainer\.log_every: expected null or an integer >= 1, got 0"):
        UpdateMeans(0, 1, recipe(), [])


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot be written"):
        JsonLines(tmp_path / "deleted" / "rows.jsonl").log({"a": 1})
    JsonLines(path).log({"a": 1})
    JsonLines(path).log({"a": 2})
    with path.open("a") as file:
        file.write('{"a": 3, "torn')
    assert read_rows(path) == [{"a": 1}, {"a": 2}]
    JsonLines(path, [{"a": nan, "b": 1.5}]).log({"a": -inf})
    assert path.read_text() == '{"a": null, "b": 1.5}\n{"a": null}\n', "JSON has no NaN"
    assert [isnan(found["a"]) for found in read_rows(path)] == [True, True]
    for content, message in (
        (b'{"a": 1}\n{"a"\n{"a": 2}\n', "expected a JSON object in line 2, got '{\"a\"'"),
        (b"[1]\n", r"expected a JSON object in line 1, got \[1\]"),
        (b"\xff\xfe\x00", "can't be read"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"rows.jsonl: {message}"):
            read_rows(path)
