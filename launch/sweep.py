"""Train once for each combination of values, and collect the results: ``python -m launch.sweep k=1,2,4 model=revnet18,revnet34``.

Values separated by commas are swept. All other overrides apply to every run (the syntax is Hydra's). Each run has its own folder
under --out. Run the same command again to continue an interrupted sweep: finished runs are skipped, unfinished ones resume from
their last checkpoint. sweep.md and sweep.json under --out hold the results so far.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from launch.config.compose import compose_overrides, hydra_errors
from launch.config.schema import AUTO, Config
from launch.run.build import set_up
from launch.run.markdown import table
from launch.runtime.rank import Process
from petra.errors import PetraError, invalid
from petra.training import write_json

SBATCH = Path(__file__).parent / "templates" / "slurm.sbatch"
RESUME = f"resume={AUTO}"
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "test accuracy": lambda s: f"{s['test_accuracy']:.2%}",
    "test loss": lambda s: f"{s['test_loss']:.4f}",
    "train loss": lambda s: f"{s['train_loss']:.4f}",
    "images or tokens/s": lambda s: f"{next(value for key, value in s.items() if key.endswith('_per_second')):.0f}",
    "peak memory (GiB)": lambda s: f"{max(s['peak_memory_bytes']) / 2**30:.2f}",
    "seconds": lambda s: f"{s['wall_seconds']:.0f}",
}


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

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
        path = self.folder / "summary.json"
        if not path.exists():
            return None
        found, wanted = OmegaConf.load(self.folder / "config.yaml"), OmegaConf.structured(self.config)
        if differing := _differences(OmegaConf.to_container(found), OmegaConf.to_container(wanted)):
            raise invalid("--out", "a new folder", f"{self.folder}, a finished run with another {', '.join(differing)}")
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def command(self) -> list[str]:
        """Return the overrides of launch.train, quoted for Hydra. The run resumes if its folder has a checkpoint."""
        quoted = str(self.folder).replace("'", "\\'")
        return [RESUME, *self.overrides, f"run_dir='{quoted}'"]


def main(arguments: list[str] | None = None) -> None:
    """Check all runs, train the unfinished ones, and print the table. Exit with status 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("runs", "sweep"), help="folder of the sweep (default: runs/sweep)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes of each run on this machine (default: 1)")
    parser.add_argument("--slurm", metavar="OPTIONS", help="submit the runs to Slurm with these options of sbatch, which may be ''")
    options, overrides = parser.parse_known_args(arguments)
    try:
        sweep = jobs(overrides, options.out.resolve())
        for job in sweep:
            check(job.config, options.processes, here=options.slurm is None)
        unfinished = [job for job in sweep if job.summary() is None]
        failed = (
            run_here(unfinished, options.processes) if options.slurm is None else submit(unfinished, shlex.split(options.slurm))
        )
        print(collect(sweep, options.out), end="")
    except PetraError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    for job in failed:
        print(f"failed: {job.folder}", file=sys.stderr)
    sys.exit(1 if failed else 0)


def jobs(overrides: Sequence[str], out: Path) -> list[Job]:
    """Return a job for each combination of values. The values of the last override change fastest.

    Raises:
        ConfigError: If Hydra can't parse an override.
    """
    parser = OverridesParser.create()
    choices: list[list[tuple[str, str, bool]]] = []
    for text in overrides:
        with hydra_errors([text]):
            (override,) = parser.parse_overrides([text])
        key, _, value = text.partition("=")
        swept = override.is_sweep_override()
        choices.append([(key, str(v), True) for v in override.sweep_string_iterator()] if swept else [(key, value, False)])
    result = []
    for combination in product(*choices):
        values = {key: value for key, value, swept in combination if swept}
        name = "_".join(re.sub(r"[^\w.,=-]+", "-", f"{key}={value}") for key, value in values.items()) or "run"
        result.append(Job(values, tuple(f"{key}={value}" for key, value, _ in combination), out / name))
    return result


def check(config: Config, processes: int, here: bool) -> None:
    """Check a configuration before any run starts.

    Args:
        config: Configuration of a run.
        processes: Number of processes of the run.
        here: The run uses this machine's devices. A machine that only submits to Slurm may have none.

    Raises:
        ConfigError, ModelError: If the configuration cannot be run. The message names the key.
    """
    device = config.trainer.device if here else "cpu"
    process = Process(rank=0, world=processes, local_rank=0, local_world=processes)
    set_up(replace(config, trainer=replace(config.trainer, device=device)), process)


def run_here(unfinished: Sequence[Job], processes: int) -> list[Job]:
    """Run jobs on this machine, one after another. Return those that failed."""
    failed = []
    for job in unfinished:
        print(f"--- {job.folder.name}", flush=True)
        launch = [sys.executable, "-m", "launch.local", "--processes", str(processes)]
        if subprocess.run([*launch, *job.command()]).returncode:
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


def collect(sweep: Sequence[Job], out: Path) -> str:
    """Write sweep.json and sweep.md. Return the latter, a table with a row for each finished run."""
    summaries = [(job, job.summary()) for job in sweep]
    finished = [(job, summary) for job, summary in summaries if summary is not None]
    keys = list(sweep[0].values)
    rows = [[*job.values.values(), *(show(summary) for show in COLUMNS.values())] for job, summary in finished]
    text = table([*keys, *COLUMNS], rows)
    text += f"\n{len(finished)} of {len(sweep)} runs finished\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "sweep.md").write_text(text)
    runs = [{"values": job.values, "folder": job.folder.name, "summary": summary} for job, summary in finished]
    write_json(out / "sweep.json", {"runs": runs})
    return text


def _queued(number: str) -> bool:
    """Return whether a Slurm job is pending or running."""
    found = subprocess.run(["squeue", "--noheader", "--jobs", number], capture_output=True, text=True)
    return found.returncode == 0 and bool(found.stdout.strip())


def _differences(found: Any, wanted: Any, key: str = "") -> list[str]:
    """Return the keys on which two configurations differ, other than the folder and how the run starts."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = dict.fromkeys([*found, *wanted])
        return [d for n in names for d in _differences(found.get(n), wanted.get(n), f"{key}.{n}" if key else str(n))]
    return [] if found == wanted or key in ("run_dir", "resume") else [key]


if __name__ == "__main__":
    main()
