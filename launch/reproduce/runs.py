"""The runs that a reproduction needs. Finished runs are used; the others are trained as by ``launch.train``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from petra.errors import PetraError

from ..config.compose import compose_overrides
from ..config.schema import AUTO
from ..run.jobs import Job, check_job, run_here
from ..run.report import history
from ..run.resume import changes_results, flat
from .report import Request

ALSO_COMPARED = ("trainer.epochs", "trainer.stages")
"""Keys that must agree, in addition to those that a resumed run may not change."""
GROUPS = ("model", "data", "method", "remedy", "optim", "schedule")


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        summary: Content of summary.json.
        rows: Rows of metrics.jsonl, one per epoch.
    """

    folder: Path
    summary: dict[str, Any]
    rows: list[dict[str, Any]]

    def record(self) -> dict[str, Any]:
        """Return the run for the raw data of a report."""
        return {"folder": str(self.folder), "summary": self.summary, "epochs": self.rows}


def folder_name(name: str) -> str:
    """Return the name of a setting with ``_`` for what isn't a letter or a digit, for the folder of its run."""
    return "".join(c if c.isalnum() else "_" for c in name)


def job(request: Request, name: str, *overrides: str) -> Job:
    """Return a run with these overrides in the folder ``name``. The request's overrides take precedence."""
    return Job({}, (*overrides, *request.overrides), request.out.resolve() / "runs" / name)


def collect(request: Request, wanted: Mapping[str, Job], processes: int | None = None) -> dict[str, Run]:
    """Train the unfinished jobs, and return all runs by name. With ``gather`` return only the runs that are finished.

    Args:
        processes: Number of processes of each run; None for the request's.

    Raises:
        PetraError: If a configuration is invalid (before any run starts), or if runs failed (after all runs).
    """
    finished = [pair for folder in (request.out.resolve() / "runs", *request.folders) for pair in _finished_folders(folder)]
    found = {name: run for name, job in wanted.items() if (run := _finished_run(finished, job)) is not None}
    unfinished = [job for name, job in wanted.items() if name not in found]
    if request.gather or not unfinished:
        return found
    count = request.processes if processes is None else processes
    for job in unfinished:
        job.summary()  # raises an error if the folder has a finished run with another configuration
        check_job(job.config, count, here=True)
    failed = run_here(unfinished, count)
    if failed:
        names = ", ".join(job.folder.name for job in failed)
        raise PetraError(f"{len(failed)} of {len(wanted)} runs failed: {names}. Run the same command again to resume them.")
    return {name: found[name] if name in found else _read(job.folder) for name, job in wanted.items()}


def missing(wanted: Sequence[str], found: Mapping[str, Run]) -> str:
    """Return a sentence about the runs that a table lacks, or an empty string."""
    return "" if len(found) == len(wanted) else f"\n{len(found)} of {len(wanted)} runs finished.\n"


def same_results(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether two configurations agree in every key that changes what is computed.

    A key that is missing in ``found``, because an earlier version wrote it, has its default. ``auto`` agrees with any value.
    """
    before = dict(flat(found))
    # In earlier versions the keys of the schedule belonged to the optimizer.
    before |= {
        f"schedule.{key}": before[f"optim.{key}"] for key in ("warmup_epochs", "milestones", "gamma") if f"optim.{key}" in before
    }
    if any(found[group]["name"] != wanted[group]["name"] for group in GROUPS if group in found):
        return False  # and the name may be unknown here
    known = _defaults(tuple(f"{group}={found[group]['name']}" for group in GROUPS if group in found)) | before
    for key, value in flat(wanted):
        compared = changes_results(key) or key in ALSO_COMPARED or (key == "trainer.diagnose" and value is not None)
        if compared and AUTO not in (value, known.get(key)) and known.get(key) != value:
            return False
    return "method.name" in before


def _finished_run(finished: Sequence[tuple[Path, dict[str, Any]]], job: Job) -> Run | None:
    """Return a finished run that computes the same as a job, if there is one."""
    wanted = asdict(job.config)
    return next((_read(path) for path, config in finished if same_results(config, wanted)), None)


def _finished_folders(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the finished runs among a folder and its subfolders, with their configurations."""
    for path in (folder, *sorted(p for p in folder.glob("*") if p.is_dir())):
        if (path / "summary.json").exists() and (path / "config.yaml").exists():
            config = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
            assert isinstance(config, dict)
            yield path, {str(key): value for key, value in config.items()}


def _read(folder: Path) -> Run:
    return Run(folder, json.loads((folder / "summary.json").read_text()), history(folder))


@cache
def _defaults(groups: tuple[str, ...]) -> dict[str, Any]:
    return dict(flat(asdict(compose_overrides(groups))))
