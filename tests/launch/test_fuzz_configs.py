"""A fixed sample of the random configurations of ``python -m stress.fuzz_configs``, and errors that it has found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from stress.fuzz_configs import command_lines, limited_attempt, prepare

SMALL = [
    "model=revvit",
    "data=synthetic",
    "data.size=8",
    "data.images=24",
    "data.batch_size=3",
    "model.depth=1",
    "trainer.device=cpu",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("fuzz")
    prepare(folder)
    return folder


@settings(max_examples=5)
@given(line=command_lines)
def test_a_random_configuration_runs_or_is_one_error(line: list[str], folder: Path) -> None:
    limited_attempt(line, folder)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.milestones=[[1]]", "schedule.milestones: expected null or a list of integers, got [[1]]"),
        ("trainer.timeout=inf", "trainer.timeout: expected a number > 0 and <= 10000000, got inf"),
        ("k=1000000000", "k: expected an integer from 1 to 10000, got 1000000000"),
        ("method.delay=1000000000", "method.delay: expected at most 10000 in total, got 2000000000"),
        ("model.depth=1000000000", "model.depth: expected an integer from 1 to 10000, got 1000000000"),
        ("data.workers=1000000000", "data.workers: expected an integer from 0 to 1000, got 1000000000"),
        (
            "data.classes=9223372036854775808",
            "data.classes: expected an integer from 1 to 10000000, got 9223372036854775808",
        ),
        ("remedy.discount=inf", "remedy.discount: expected null or a number >= 0, got inf"),
        ("remedy.horizon=1e300", "remedy.horizon: expected a number > 0 and <= 100, got 1e+300"),
        (
            "optim=muon remedy=prediction",
            "optim.name: expected adam, adamw, or sgd with momentum > 0, which remedy.prediction requires, got muon",
        ),
    ],
)
def test_errors_found_earlier(override: str, message: str, folder: Path) -> None:
    assert limited_attempt([*SMALL, *override.split()], folder).lower() == message.lower()
