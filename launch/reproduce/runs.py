"""The runs that a reproduction needs: those that exist are taken, the others trained as ``launch.train`` would."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from launch import sweep
from launch.compare import history
from launch.config.compose import compose_overrides
from launch.config.schema import AUTO
from launch.reproduce.report import Request
from launch.run.resume import changes_results, flat
from launch.sweep import Job
from petra.errors import PetraError

ALSO = ("trainer.epochs", "trainer.stages")
"""What must agree beside the keys that a resumed run may not change."""
GROUPS = ("model", "data", "method", "remedy", "optim", "schedule")


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, summary.json, and the rows of metrics.jsonl."""

    folder: Path
    summary: dict[str, Any]
    rows: list[dict[str, Any]]

    def record(self) -> dict[str, Any]:
        """For the raw JSON."""
        return {"folder": str(self.folder), "summary": self.summary, "epochs": self.rows}


def job(request: Request, name: str, *overrides: str) -> Job:
    """A run of these settings, in a folder of this name unless it exists elsewhere; the request's overrides win."""
    return Job({}, (*overrides, *request.overrides), request.out.resolve() / "runs" / name)


def collect(request: Request, wanted: Mapping[str, Job], processes: int | None = None) -> dict[str, Run]:
    """Finished runs of these jobs, by name; with ``gather`` those that there are, otherwise all of them.

    Args:
        processes: of each run; None for the request's.

    Raises:
        PetraError: a setting that can't work, before anything is trained; runs that failed, after all others.
    """
    found = {name: run for name, job in wanted.items() if (run := _existing(request, job)) is not None}
    left = [job for name, job in wanted.items() if name not in found]
    if request.gather or not left:
        return found
    count = request.processes if processes is None else processes
    for job in left:
        job.summary()  # refuses a folder where a run of other settings is
        sweep.check(job.config, count, here=True)
    failed = sweep.run_here(left, count)
    if failed:
        names = ", ".join(job.folder.name for job in failed)
        raise PetraError(f"{len(failed)} of {len(wanted)} runs failed: {names}; the same command goes on with them")
    return {name: found[name] if name in found else _run(job.folder) for name, job in wanted.items()}


def missing(wanted: Sequence[str], found: Mapping[str, Run]) -> str:
    """A sentence about the runs that a table lacks, or nothing."""
    return "" if len(found) == len(wanted) else f"\n{len(found)} of {len(wanted)} runs finished.\n"


def fits(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a run of one configuration answers for another: they agree in all that changes what is computed.

    A key that is not in ``found``, written by an earlier version, stands for its default; ``auto`` fits whatever was chosen.
    """
    before = dict(flat(found))
    # The schedule belonged to the optimizer before there were other schedules.
    before |= {
        f"schedule.{key}": before[f"optim.{key}"] for key in ("warmup_epochs", "milestones", "gamma") if f"optim.{key}" in before
    }
    known = _defaults(tuple(f"{group}={found[group]['name']}" for group in GROUPS if group in found)) | before
    for key, value in flat(wanted):
        compared = changes_results(key) or key in ALSO or (key == "trainer.diagnose" and value is not None)
        if compared and AUTO not in (value, known.get(key)) and known.get(key) != value:
            return False
    return "method.name" in before


def _existing(request: Request, job: Job) -> Run | None:
    wanted = asdict(job.config)
    for folder in (request.out.resolve() / "runs", *request.folders):
        for path, config in _finished(folder):
            if fits(config, wanted):
                return _run(path)
    return None


def _finished(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Run folders that are complete: the folder itself, or those in it."""
    for path in (folder, *sorted(p for p in folder.glob("*") if p.is_dir())):
        if (path / "summary.json").exists() and (path / "config.yaml").exists():
            config = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
            assert isinstance(config, dict)
            yield path, {str(key): value for key, value in config.items()}


def _run(folder: Path) -> Run:
    return Run(folder, json.loads((folder / "summary.json").read_text()), history(folder))


@cache
def _defaults(groups: tuple[str, ...]) -> dict[str, Any]:
    return dict(flat(asdict(compose_overrides(groups))))
