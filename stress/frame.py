"""What the programs of this folder share: a short run, waits with a limit, comparisons with a run that nothing interrupted, and
tries of what could be wrong without a word.
"""

import argparse
import json
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
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


def run_tries(text: str | None, tries: Mapping[str, tuple[str, Callable[[], tuple[str, str]]]]) -> None:
    """Make tries, print how each ended and how many of each area, and exit, with status 1 if one is not right.

    Args:
        text: Docstring of the program. Its option ``--only`` chooses tries by their names.
        tries: By name, the area of each, and a function that returns how it ended, in capitals if it is not right, and details.
    """
    parser = parser_of(text)
    parser.add_argument("--only", metavar="TEXT", default="", help="only tries with this text in their names")
    only, ended = parser.parse_args().only, Counter[tuple[str, str]]()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, (area, attempt) in tries.items():
        if only in name:
            try:
                how, details = attempt()
            except Exception as error:
                how, details = "RAISED", f"{type(error).__name__}: {error}"
            ended[area, how] += 1
            print(f"{area}: {name}: {how}{details and ': '}{details}"[:400], flush=True)
    for (area, how), count in sorted(ended.items()):
        print(f"{area}: {count} {how}")
    failed, silent = (sum(n for (_, how), n in ended.items() if how.isupper() and kind in how) for kind in ("", "SILENT"))
    print(f"{ended.total()} tries, {failed} not right, {silent} silent")
    sys.exit(bool(failed))


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
