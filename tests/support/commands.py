"""Configurations, runs and failing commands, all in this process."""

import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from launch.config.compose import compose_overrides
from launch.run.build import Setup, set_up
from launch.run.training import run
from launch.runtime.rank import Process

ALONE = Process(rank=0, world=1, local_rank=0, local_world=1)
TINY = ["data=synthetic", "data.images=64", "data.batch_size=8", "model.width=0.0625", "trainer.epochs=1", "trainer.device=cpu"]


def planned(*overrides: str, place: Process = ALONE) -> Setup:
    return set_up(compose_overrides([*overrides]), place)


def train(*overrides: str) -> None:
    run(compose_overrides([*overrides]), ALONE)


def refused(main: Callable[..., object], words: list[str] | None, *, silent: bool = True) -> str:
    """Call a command that ends with status 2, one line that begins with ``error: ``, and no output. Return the rest of the line."""
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors, pytest.raises(SystemExit) as ended:
        main() if words is None else main(words)
    (line,) = [line for line in errors.getvalue().splitlines() if not line.startswith("weights of ")]
    assert ended.value.code == 2
    assert not silent or not output.getvalue()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file in JSON Lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
