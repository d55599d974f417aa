"""What a run writes into its folder: config.yaml, metrics, updates and changes as JSON Lines, summary.json, report.html."""

from __future__ import annotations

import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import torch
from omegaconf import OmegaConf

from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.errors import invalid, require
from petra.training import JsonLines, Logger, Row, locked, new_run_folder, write_json
from petra.training.checkpoint import checkpoints
from petra.training.progress import means_text
from petra.training.records import PART, finite, write_text_atomically, writing

from ..config.schema import AUTO, Config
from ..runtime.rank import Process
from .build import Setup
from .costs import stage_facts
from .folder import CHANGES, CHECKPOINTS, CONFIG, GRADIENTS, METRICS, SUMMARY, UPDATES, as_data, gradients_in, updates_in
from .page import describe, trained_text, write_report
from .resume import Start
from .targets import built
from .undo import REWRITTEN, RunFolder, missing_folders

RESULTS = ("miou", "perplexity", "accuracy")
"""Metrics on the test data; the last line of a run has the first one that it recorded."""
LONGEST_NAME = 200
"""Letters of the name of a default folder, of which file systems allow 255 bytes."""
SHARED_WITHIN = 60.0
"""Seconds to wait until a network file system shows a new file on other machines."""


class Records:
    """Records of a run in its first process. The constructor creates the folder.

    Args:
        setup: Configuration and plan.
        start: What the run starts from. If the run resumes, the rows of the epochs already done are written again.
        evaluated: What the network is evaluated on (:func:`launch.run.page.evaluated_text`).
        path: The folder.

    Attributes:
        folder: Folder of the run.
        loggers: Receivers of the numbers of epochs.
        update_loggers: Receivers of the numbers of updates.

    Raises:
        ConfigError: If the folder contains another run or cannot be created.
        DataError: If a file in it cannot be written.
    """

    def __init__(self, setup: Setup, start: Start, evaluated: str, path: Path) -> None:
        self.setup, config, rows = setup, setup.config, start.history
        self.evaluated = evaluated
        self._resumed = "" if start.path is None else f" since it was resumed after microbatch {start.clock}"
        # A folder that was deleted while its run wrote checkpoints has no config.yaml.
        resumed = config.resume == AUTO and ((path / CONFIG).exists() or bool(checkpoints(path / CHECKPOINTS)))
        updates = [] if start.path is None else updates_in(path, start.clock)
        self.folder = path if resumed else new_run_folder(path)
        for name in {SUMMARY} if start.path is not None else {*REWRITTEN} - {CONFIG}:  # config.yaml is replaced
            (self.folder / name).unlink(missing_ok=True)
        if (self.folder / GRADIENTS).exists():  # the run may resume without trainer.diagnose
            JsonLines(self.folder / GRADIENTS, gradients_in(self.folder, start.clock))
        content = as_data(config)
        write_text_atomically(self.folder / CONFIG, OmegaConf.to_yaml(content))
        shared: list[Logger] = []
        if config.logger.name != JsonLines.__name__:
            earlier = sorted([*updates, *rows], key=lambda row: row["microbatches"])
            given = {"folder": self.folder, "config": content, "rows": earlier, "microbatches": start.clock}
            shared.append(built(Logger, "logger", config.logger, **given))  # type: ignore[type-abstract]
        self.loggers: list[Logger] = [JsonLines(self.folder / METRICS, rows), *shared]
        self.update_loggers: list[Logger] = [JsonLines(self.folder / UPDATES, updates), *shared]
        for key, (before, now) in start.changes.items():
            JsonLines(self.folder / CHANGES).log({"microbatch": start.clock, "key": key, "before": before, "now": now})

    def headline(self) -> str:
        """Return one line that describes the run."""
        layout, facts = self.setup.plan.layout, self._facts()
        replicas = f"; {layout.dp} replicas with {layout.inputs.shape[0]} samples each" if layout.dp > 1 else ""
        idle = layout.dp * sum(not stages for stages in layout.processes)
        waiting = f"; {idle} process(es) without a stage are idle" if idle else ""
        return f"{describe(facts)}{replicas}{waiting}; records in {self.folder}"

    def summarize(self, history: Sequence[Row], memory: Sequence[int]) -> None:
        """Write summary.json, whose existence marks a run that has trained to the end.

        Losses are in nats, accuracies from 0 to 1. Speed is that of training alone. ``wall_seconds`` is the duration of all epochs,
        before and after resuming.

        Args:
            history: Numbers of the epochs.
            memory: Peak memory of each process in bytes.
        """
        last, speed = history[-1], f"{self.setup.unit}_per_second"
        self._summary = self._facts() | {
            "epochs": len(history),
            "microbatches": last["microbatches"],
            **{key: value for key, value in last.items() if key.startswith(("train_", "test_"))},
            speed: harmonic_mean([row[speed] for row in history]),
            "peak_memory_bytes": list(memory),
            "wall_seconds": sum(row["seconds"] for row in history),
            "seed": self.setup.config.seed,
            "torch": torch.__version__,
            "layout": stage_facts(self.setup.plan),
        }
        write_json(self.folder / SUMMARY, finite(self._summary))

    def close(self, seconds: float) -> None:
        """Close the loggers, write report.html, and print the result of a run after ``seconds``. :meth:`summarize` comes first."""
        summary, timeline = self._summary, self.folder / "timeline.png"
        for logger in self.loggers:
            logger.close(summary, [timeline] if timeline.exists() else [])
        write_report(self.folder, summary)
        name = next(f"test_{name}" for name in RESULTS if f"test_{name}" in summary)
        found = means_text({name.removeprefix("test_"): summary[name]})
        print(f"{self.evaluated} {found} after {seconds:.0f} s{self._resumed}; records in {self.folder}", flush=True)

    def _facts(self) -> dict[str, Any]:
        plan, config = self.setup.plan, self.setup.config
        return {
            "method": plan.method.name,
            "delay": plan.method.delay,
            "remedy": config.remedy.name,
            "model": plan.model.name,
            "model_options": {name: value for name, value in config.model.options.items() if value is not None},
            "data": config.data.name,
            "parameters": plan.parameters,
            "stages": len(plan.stages),
            "processes": self.setup.processes,
            "dp": plan.layout.dp,
            "transport": plan.transport,
            "device": self.setup.device.type,
            "precision": config.trainer.precision,
            "k": plan.k,
            "batch_size": config.data.batch_size,
            "trained": trained_text(config),
            "evaluated": self.evaluated,
            "limit_batches": config.trainer.limit_batches,
        }


@contextmanager
def exclusive_folder(config: Config, process: Process, swept: Sequence[str] = ()) -> Iterator[RunFolder | None]:
    """Hold the lock on the run's folder for the duration of the context. Every rank must enter it; rank 0 holds the lock.

    A run without ``run_dir`` gets a folder of its own, which another job could resume. Until the first microbatch, an error leaves
    the folder as it was.

    Args:
        swept: Overrides of a sweep, for the name of a folder of its own.

    Yields:
        The folder on rank 0, None on the others.

    Raises:
        PetraError: If another job uses the folder. Raised on every rank.
    """
    with ExitStack() as stack:
        folder = None
        with raise_on_all_ranks():
            if process.first:
                missing = missing_folders(Path(config.run_dir or "runs"))
                path = default_folder(config, swept) if config.run_dir is None else Path(config.run_dir)
                folder = RunFolder(path, [path, *missing] if config.run_dir is None else missing)
                if not stack.enter_context(locked(path)):
                    refused = "so a second job in this folder is not refused"
                    print(f"warning: the file system of {path} has no locks, {refused}", file=sys.stderr, flush=True)
                stack.enter_context(folder.undone_on_error())
        yield folder


def default_folder(config: Config, swept: Sequence[str] = ()) -> Path:
    """Create a folder under ``runs`` for a run without ``run_dir``. Runs that start in the same second get different folders.

    Args:
        swept: Overrides that differ between the runs of a sweep; the name has them.

    Raises:
        ConfigError: If it cannot be created.
    """
    parts = [f"{datetime.now():%F_%H-%M-%S}", config.model.name, config.method.name, config.data.name, *swept]
    name = re.sub(r"[^\w.=-]", "-", "_".join(parts))[:LONGEST_NAME]
    path = Path("runs", name)
    for number in count(2):
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            path = Path("runs", f"{name}_{number}")
        except OSError as error:
            raise invalid("run_dir", "a folder, since the default one cannot be created", f"{path} ({error.strerror})") from error
    return path


def require_shared(folder: Path, timeout: float, process: Process) -> None:
    """Check that all ranks see a folder, so that no machine has only a part of a checkpoint. Every rank must call this.

    Args:
        timeout: Seconds that ranks wait for each other.

    Raises:
        ConfigError: If a rank does not see the folder. Raised on every rank.
    """
    seen = folder / all_gather_objects(f"seen_by_all_{secrets.token_hex(8)}{PART}")[0]
    with raise_on_all_ranks(), writing(seen):
        if process.first:
            folder.mkdir(exist_ok=True)
            for stale in folder.glob(f"seen_by_all_*{PART}"):  # of a run that was killed here
                stale.unlink()
            seen.touch()
    until = time.monotonic() + min(SHARED_WITHIN, timeout / 2)
    expected = "a folder on storage that all machines share, or checkpoint.keep=0"
    with raise_on_all_ranks():
        while not seen.exists():
            require(time.monotonic() < until, "run_dir", expected, f"{folder}, which {socket.gethostname()} does not see")
            time.sleep(0.1)
    if process.first:
        seen.unlink()
