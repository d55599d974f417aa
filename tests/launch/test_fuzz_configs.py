"""Some random configurations of ``python -m tests.fuzz_configs``, always the same, and what it found before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from tests.fuzz_configs import command_lines, limited_attempt, prepare

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


@settings(max_examples=15)
@given(line=command_lines)
def test_a_random_configuration_runs_or_is_refused_in_one_line(line: list[str], folder: Path) -> None:
    limited_attempt(line, folder)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.milestones=[[1]]", "schedule.milestones: found [[1]], accepted are null or lists of integers"),
        ("trainer.timeout=inf", "trainer.timeout: found inf, accepted are numbers > 0, at most 10000000"),
        ("k=1000000000", "k: found 1000000000, accepted are integers from 1 to 10000"),
        ("method.delay=1000000000", "method.delay: found 2000000000 in all, accepted are at most 10000"),
        ("model.depth=1000000000", "model.depth: found 1000000000, accepted are whole numbers from 1 to 10000"),
        ("data.workers=1000000000", "data.workers: found 1000000000, accepted are integers >= 0, at most 1000"),
        (
            "data.classes=9223372036854775808",
            "data.classes: found 9223372036854775808, accepted are integers >= 1, at most 10000000",
        ),
        ("remedy.discount=inf", "remedy.discount: found inf, accepted are numbers >= 0"),
        ("remedy.horizon=1e300", "remedy.horizon: expected a number > 0 and <= 100, got 1e+300"),
        ("optim=muon remedy=lookahead", "remedy.lookahead: expected sgd with momentum > 0 as the optimizer, got muon"),
    ],
)
def test_what_was_found(override: str, message: str, folder: Path) -> None:
    assert limited_attempt([*SMALL, *override.split()], folder).lower() == message.lower()
