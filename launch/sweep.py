"""Train once for each combination of values: ``petra sweep k=1,2,4 model=revnet18,revnet34``.

Values separated by commas are swept. All other overrides apply to every run (the syntax is Hydra's). Each run has processes and,
under --out, a folder of its own, and a failing run doesn't end the others, unlike with ``petra train --multirun``. Run the same
command again to continue an interrupted sweep: finished runs are skipped, unfinished ones resume from their last checkpoint.
The table at the end is that of ``petra compare``.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from petra.errors import require

from . import own_module
from .compare import compare
from .config.compose import compose_overrides, hydra_errors, require_arguments
from .config.schema import AUTO, Config
from .run.folder import RunFolder, as_data, differences
from .runtime.rank import Process
from .runtime.reporting import CANCELLED, STOPPED
from .runtime.terminal import command, parser_for

RESUME = f"resume={AUTO}"


@command
def main(arguments: list[str] | None = None) -> None:
    """Check all runs, train the unfinished ones, and print the table. Exit with status 1 if a run failed."""
    parser = parser_for(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs", "sweep"), help="folder of the sweep (default: runs/sweep)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes of each run on this machine (default: 1)")
    parser.add_argument("--config-dir", type=Path, metavar="FOLDER", help="further folder with configuration files")
    options, overrides = parser.parse_known_args(arguments)
    require(options.processes >= 1, "--processes", "an integer >= 1", options.processes)
    require_arguments(overrides)
    if options.config_dir is not None:
        require(options.config_dir.is_dir(), "--config-dir", "a folder", options.config_dir)
        quoted = str(options.config_dir.resolve()).replace("'", "\\'")
        overrides.insert(0, f"hydra.searchpath=['file://{quoted}']")
    sweep = jobs(overrides, options.out.resolve())
    for job, _ in [(job, job.config) for job in sweep]:  # composes all before the first one is planned
        job.check(options.processes)
    failed = train_jobs([job for job in sweep if job.summary() is None], options.processes)
    finished = [job.folder for job in sweep if job.summary() is not None]
    if finished:
        compare(finished, None)
    print(f"\n{len(finished)} of {len(sweep)} runs finished")
    for job in failed:
        print(f"failed: {job.folder}", file=sys.stderr)
    sys.exit(1 if failed else 0)


@dataclass(frozen=True)
class Job:
    """One run of a sweep or of a reproduction.

    Attributes:
        overrides: All overrides of this run.
        folder: Folder of this run.
    """

    overrides: tuple[str, ...]
    folder: Path

    @cached_property
    def config(self) -> Config:
        """Return the configuration.

        Raises:
            ConfigError: If an override can't be parsed or doesn't fit the schema.
        """
        return replace(compose_overrides([RESUME, *self.overrides]), run_dir=str(self.folder))

    def summary(self) -> dict[str, Any] | None:
        """Return the content of summary.json, or None if the run has not finished.

        Raises:
            ConfigError: If the folder has a finished run with another configuration.
        """
        run = RunFolder(self.folder)
        if not (content := run.summary()):
            return None
        differing = sorted(differences(run.config(), as_data(self.config)).keys() - {"run_dir", "resume", "resume_change"})
        got = f"{self.folder}, a finished run with another {', '.join(differing)}"
        require(not differing, "--out", "a new folder", got)
        return content

    def command(self) -> list[str]:
        """Return the overrides of launch.train, quoted for Hydra. The run resumes if its folder has a checkpoint."""
        quoted = str(self.folder).replace("'", "\\'")
        return [RESUME, *self.overrides, f"run_dir='{quoted}'"]

    def check(self, processes: int) -> None:
        """Check the configuration for a number of processes before any run starts.

        Raises:
            PetraError: If it cannot be run, or needs a path to its data.
        """
        from .run.build import set_up
        from .run.data import load

        if self.config.data.options.get("root", "") is None:
            load(self.config.data)  # raises the error that tells where to get the files
        set_up(self.config, Process(rank=0, world=processes, local_rank=0, local_world=processes))


def train_jobs(unfinished: Sequence[Job], processes: int) -> list[Job]:
    """Train jobs one after another. Return those that failed.

    Exit with the status of a job that was stopped. Ctrl-C reaches the job, too: this process waits until the job has saved.
    """
    failed = []
    launch = [sys.executable, "-m", own_module("launch.train"), *(["--nproc", str(processes)] if processes > 1 else [])]
    for job in unfinished:
        print(f"--- {job.folder.name}", flush=True)
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:  # which the job would inherit, unlike a function
            signal.signal(signal.SIGINT, lambda number, frame: None)
        try:
            status = subprocess.run([*launch, *job.command()]).returncode
        finally:
            signal.signal(signal.SIGINT, before)
        if status in (STOPPED, CANCELLED):
            sys.exit(status)
        if status:
            failed.append(job)
    return failed


def jobs(overrides: Sequence[str], out: Path) -> list[Job]:
    """Return a job for each combination of values. The values of the last override change fastest.

    Raises:
        ConfigError: If Hydra can't parse an override.
    """
    parser, choices, swept = OverridesParser.create(), [], []
    for text in overrides:
        with hydra_errors([text]):
            (override,) = parser.parse_overrides([text])
            swept.append(override.is_sweep_override())
            values = override.sweep_string_iterator() if swept[-1] else ()
            choices.append([f"{text.partition('=')[0]}={value}" for value in values] or [text])
    found = []
    for words in product(*choices):
        names = [re.sub(r"[^\w.,=-]+", "-", word) for word, varies in zip(words, swept, strict=True) if varies]
        found.append(Job(words, out / ("_".join(names) or "run")))
    return found


if __name__ == "__main__":
    main()
