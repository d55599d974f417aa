"""Jobs: runs with a folder and overrides of their own, on this machine or submitted to Slurm."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from petra.errors import invalid, require

from .. import own_module
from ..config.compose import compose_overrides
from ..config.schema import AUTO, Config
from ..runtime.rank import Process
from ..runtime.reporting import CANCELLED, STOPPED
from .saved import as_data

SBATCH = Path(__file__).parents[1] / "templates" / "slurm.sbatch"
RESUME = f"resume={AUTO}"


@dataclass(frozen=True)
class Job:
    """One run of a sweep or of a reproduction.

    Attributes:
        values: Swept keys and the values of this run.
        overrides: All overrides of this run.
        folder: Folder of this run.
    """

    values: dict[str, str]
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
        from .folder import RunFolder
        from .resume import differences

        run = RunFolder(self.folder)
        if not (content := run.summary()):
            return None
        found: Any = OmegaConf.to_container(run.config())
        differing = [key for key in differences(found, as_data(self.config)) if key not in ("run_dir", "resume", "resume_change")]
        if differing:
            raise invalid("--out", "a new folder", f"{self.folder}, a finished run with another {', '.join(differing)}")
        return content

    def command(self) -> list[str]:
        """Return the overrides of launch.train, quoted for Hydra. The run resumes if its folder has a checkpoint."""
        quoted = str(self.folder).replace("'", "\\'")
        return [RESUME, *self.overrides, f"run_dir='{quoted}'"]


def check_job(config: Config, processes: int, here: bool) -> None:
    """Check a configuration before any run starts.

    Args:
        config: Configuration of a run.
        processes: Number of processes of the run.
        here: The run uses the devices and files of this machine. A machine that only submits to Slurm may have none.

    Raises:
        PetraError: If it cannot be run; see :func:`launch.run.build.set_up`. Only the existence of ``data.root`` is checked,
            not the files in it.
    """
    from .build import set_up
    from .data import check_root

    check_root(config.data, here)
    device = config.trainer.device if here else "cpu"
    process = Process(rank=0, world=processes, local_rank=0, local_world=processes)
    set_up(replace(config, trainer=replace(config.trainer, device=device)), process)


def run_here(unfinished: Sequence[Job], processes: int) -> list[Job]:
    """Run jobs on this machine, one after another. Return those that failed.

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


def submit(unfinished: Sequence[Job], options: Sequence[str]) -> list[Job]:
    """Submit jobs to Slurm unless they are already pending or running. Return those that Slurm rejected."""
    failed = []
    for job in unfinished:
        ticket = job.folder.with_name(job.folder.name + ".slurm")
        if ticket.exists() and _queued(ticket.read_text().strip()):
            print(f"{job.folder.name}: Slurm job {ticket.read_text().strip()} has not ended")
            continue
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        sbatch = ["sbatch", "--parsable", f"--job-name={job.folder.name}", f"--output={job.folder}.log"]
        try:
            done = subprocess.run([*sbatch, *options, str(SBATCH), *job.command()], capture_output=True, text=True)
        except FileNotFoundError:
            raise invalid("--slurm", "a machine with Slurm", "one without the command sbatch") from None
        if done.returncode:
            print(done.stderr, end="", file=sys.stderr)
            failed.append(job)
            continue
        ticket.write_text(done.stdout.split(";")[0].strip() + "\n")
        print(f"{job.folder.name}: Slurm job {ticket.read_text().strip()}")
    return failed


def _queued(number: str) -> bool:
    """Return whether a Slurm job is pending or running."""
    found = subprocess.run(["squeue", "--noheader", "--jobs", number], capture_output=True, text=True)
    return found.returncode == 0 and bool(found.stdout.strip())


def search_path(folder: str) -> str:
    """Return the override by which Hydra finds the files of ``folder``, too, as with its flag ``--config-dir``.

    Raises:
        ConfigError: If there is no such folder.
    """
    path = Path(folder).resolve()
    require(path.is_dir(), "--config-dir", "a folder", folder)
    quoted = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"hydra.searchpath=['file://{quoted}']"
