"""The runs that a reproduction needs. Records and finished runs are used; the others are trained as by ``launch.train``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from launch.config.schema import AUTO
from launch.run.folder import as_data, changes_results, epochs_in, flat, gradients_in, rows_of, summary_in
from petra.errors import PetraError

from .jobs import Job, train_jobs
from .record import Record, read_records
from .report import Request

ALSO_COMPARED = ("trainer.epochs", "trainer.stages")
"""Keys that must agree, in addition to those that a resumed run may not change."""
FACTS = ("method", "remedy", "delay", "k", "seed", "batch_size", "stages", "model", "parameters", "data", "epochs")
"""Fields of a record that summary.json has, too."""


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: Folder of the run, or path of its record.
        summary: Content of summary.json.
        rows: Rows of metrics.jsonl, one per epoch.
        gradients: Rows of gradients.jsonl.
    """

    folder: Path
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    gradients: Sequence[dict[str, Any]] = ()


def job(request: Request, name: str, *overrides: str) -> Job:
    """Return a run with these overrides in the folder ``name``. The request's overrides take precedence."""
    return Job((*overrides, *request.overrides), request.out.resolve() / "runs" / name)


def collect(request: Request, wanted: Mapping[str, Job], processes: int | None = None) -> dict[str, Run]:
    """Train the unfinished jobs, and return all runs by name. With ``gather`` return only the runs that are finished.

    Args:
        processes: Number of processes of each run; None for the request's.

    Raises:
        PetraError: If a configuration is invalid (before any run starts), or if runs failed (after all runs).
    """
    finished = [pair for folder in (request.out.resolve() / "runs", *request.folders) for pair in _finished_folders(folder)]
    recorded = _recorded(request)
    found = {
        name: run
        for name, job in wanted.items()
        if (run := _finished_run(finished, job) or recorded.get(job.folder.name)) is not None
    }
    unfinished = [job for name, job in wanted.items() if name not in found]
    if request.gather or not unfinished:
        return found
    count = request.processes if processes is None else processes
    for job in unfinished:
        job.check(count)
    failed = train_jobs(unfinished, count)
    if failed:
        names = ", ".join(job.folder.name for job in failed)
        raise PetraError(f"{len(failed)} of {len(wanted)} runs failed: {names}. Run the same command again to resume them.")
    return {name: found[name] if name in found else _read(job.folder) for name, job in wanted.items()}


def records(found: Mapping[str, Run]) -> dict[str, Any]:
    """Return the runs for the raw data of a report."""
    return {name: {"folder": str(run.folder), "summary": run.summary, "epochs": run.rows} for name, run in found.items()}


def missing(wanted: Sequence[str], found: Mapping[str, Run]) -> str:
    """Return a sentence about the runs that a table lacks, or an empty string."""
    return "" if len(found) == len(wanted) else f"\n{len(found)} of {len(wanted)} runs finished.\n"


def same_results(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether two configurations agree in every key that changes what is computed. ``auto`` agrees with any value."""
    known = dict(flat(found))
    for key, value in flat(wanted):
        compared = changes_results(key) or key in ALSO_COMPARED or (key == "trainer.diagnose" and value is not None)
        if compared and AUTO not in (value, known.get(key)) and known.get(key) != value:
            return False
    return True


def _recorded(request: Request) -> dict[str, Run]:
    """Return the runs among the records by setting. Overrides that change what is computed make other settings, which none has."""
    keys = [word.lstrip("+~").partition("=")[0] for word in request.overrides]
    if any(changes_results(key) or key in (*ALSO_COMPARED, "trainer.diagnose") for key in keys):
        return {}
    pairs = [pair for folder in request.folders for pair in read_records(folder) if pair[1].scale == request.scale]
    return {setting: _from_record(path, record) for path, record in pairs for setting in (record.setting, *record.also)}


def _from_record(path: Path, record: Record) -> Run:
    summary = record.summary | {name: getattr(record, name) for name in FACTS}
    return Run(path, summary, rows_of(record.curve), rows_of(record.gradients))


def _finished_run(finished: Sequence[tuple[Path, dict[str, Any]]], job: Job) -> Run | None:
    """Return a finished run that computes the same as a job, if there is one."""
    wanted = as_data(job.config)
    return next((_read(path) for path, config in finished if same_results(config, wanted)), None)


def _finished_folders(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the finished runs among a folder and its subfolders, with their configurations."""
    for path in (folder, *sorted(p for p in folder.glob("*") if p.is_dir())):
        if (path / "summary.json").exists() and (path / "config.yaml").exists():
            config = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
            assert isinstance(config, dict)
            yield path, {str(key): value for key, value in config.items()}


def _read(folder: Path) -> Run:
    summary = summary_in(folder)
    return Run(folder, summary, epochs_in(folder), gradients_in(folder))
