"""Runs of ``petra train`` in processes of their own, one after another."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from launch.config.compose import compose_overrides
from launch.config.schema import AUTO, Config
from launch.run.build import set_up
from launch.run.data import load
from launch.run.folder import CONFIG, as_data, differences, load_config, summary_in
from launch.runtime.rank import Process
from launch.runtime.reporting import CANCELLED, STOPPED
from petra.errors import require

RESUME = f"resume={AUTO}"


@dataclass(frozen=True)
class Job:
    """One run of a reproduction.

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

    def command(self) -> list[str]:
        """Return the overrides of launch.train, quoted for Hydra. The run resumes if its folder has a checkpoint."""
        quoted = str(self.folder).replace("'", "\\'")
        return [RESUME, *self.overrides, f"run_dir='{quoted}'"]

    def check(self, processes: int) -> None:
        """Check the configuration for a number of processes before any run starts.

        Raises:
            PetraError: If it cannot be run, needs a path to its data, or would replace a finished run with another configuration.
        """
        if summary_in(self.folder):
            found = load_config(self.folder / CONFIG)
            differing = differences(found, as_data(self.config)).keys() - {"run_dir", "resume", "resume_change"}
            got = f"{self.folder}, a finished run with another {', '.join(sorted(differing))}"
            require(not differing, "--out", "a new folder", got)
        if self.config.data.options.get("root", "") is None:
            load(self.config.data)  # raises the error that tells where to get the files
        set_up(self.config, Process(rank=0, world=processes, local_rank=0, local_world=processes))


def train_jobs(unfinished: Sequence[Job], processes: int) -> list[Job]:
    """Train jobs one after another. Return those that failed.

    Exit with the status of a job that was stopped. Ctrl-C reaches the job, too: this process waits until the job has saved.
    """
    failed = []
    launch = [sys.executable, "-m", "launch.train", *(["--nproc", str(processes)] if processes > 1 else [])]
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
