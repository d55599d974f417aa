"""What the programs of this folder share: a short run, waits with a limit, and comparisons with a run that nothing interrupted."""

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from petra.training.checkpoint import checkpoints, verify

SMALL = (
    *("data=synthetic", "data.batch_size=4", "data.size=16", "model.width=0.0625", "trainer.device=cpu"),
    *("run_dir=run", "resume=auto"),
)
RUN = (*SMALL, "data.images=32", "trainer.epochs=2", "checkpoint.every=3", "trainer.export=pt", "trainer.timeout=60")
"""Run with two epochs of eight microbatches, which is not a multiple of the checkpoint interval."""
PATIENCE = 400
"""Seconds that any step may take."""


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options of a program with this docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def until(
    reached: Callable[[], Any],
    output: Callable[[], object],
    *,
    seconds: float = PATIENCE,
    between: Callable[[], object] = lambda: time.sleep(0.02),
) -> Any:
    """Call ``between`` until ``reached`` returns something true, and return that.

    Raises:
        AssertionError: If that takes longer than ``seconds``. The message is what ``output`` returns.
    """
    deadline = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < deadline, output()
        between()
    return found


def saved(run: Path, count: int = 2) -> bool:
    """Return whether a run has written a number of checkpoints."""
    return len(list(run.glob("checkpoints/0*[0-9]"))) >= count


def resumed_at(log: str) -> str:
    """Return the microbatch after which a run resumed first."""
    found = re.search(r"resuming from \S+, after microbatch (\d+)", log)
    assert found is not None, log
    return found[1]


def assert_undamaged(run: Path, expected: dict[str, Any]) -> None:
    """Assert that all files with a final name in the folder of a killed run are complete."""
    for path in checkpoints(run / "checkpoints"):
        verify(path)
    if (run / "config.yaml").exists():
        assert OmegaConf.load(run / "config.yaml")["run_dir"] == "run"
    if (run / "metrics.jsonl").exists():
        found = rows(run)
        assert found == expected["metrics"][: len(found)]


def results(run: Path) -> dict[str, Any]:
    """Return all results of a finished run that do not depend on time."""
    return {
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*")),
        "metrics": rows(run),
        "weights": torch.load(run / "model.pt", weights_only=True),
        "latest": latest(run),
    }


def latest(run: Path) -> str | None:
    """Return the name of the newest checkpoint, or None if there is none."""
    return next((path.name for path in checkpoints(run / "checkpoints")), None)


def rows(run: Path) -> list[dict[str, float]]:
    """Return the metrics that a resumed run repeats: all but times, and drifts, which are measured from the start of a process."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "second" not in key and "weight_drift" not in key} for row in found]


def assert_same(run: Path, expected: dict[str, Any]) -> None:
    """Assert that a run has ended with the weights, metrics and files of the uninterrupted one."""
    found, weights = results(run), dict[str, Tensor](expected["weights"])
    assert found["weights"].keys() == weights.keys()
    different = [key for key, value in weights.items() if not torch.equal(value, found["weights"][key])]
    assert not different, f"{run}: {different[0]} differs"
    for key in ("files", "metrics", "latest"):
        assert found[key] == expected[key], f"{run}: {key}: {found[key]}, expected {expected[key]}"
