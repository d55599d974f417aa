"""Train once for each combination of values, and collect the results: ``petra sweep k=1,2,4 model=revnet18,revnet34``.

Values separated by commas are swept. All other overrides apply to every run (the syntax is Hydra's). Each run has its own folder
under --out. Run the same command again to continue an interrupted sweep: finished runs are skipped, unfinished ones resume from
their last checkpoint. sweep.md and sweep.json under --out hold the results so far.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from petra.errors import require

from .config.compose import hydra_errors, require_arguments
from .run.jobs import Job, train_jobs
from .run.markdown import table
from .runtime.terminal import command, parser_for

COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "test accuracy": lambda s: f"{s['test_accuracy']:.2%}",
    "test loss": lambda s: f"{s['test_loss']:.4f}",
    "train loss": lambda s: f"{s['train_loss']:.4f}",
    "images or tokens/s": lambda s: f"{next(value for key, value in s.items() if key.endswith('_per_second')):.0f}",
    "peak memory (GiB)": lambda s: f"{max(s['peak_memory_bytes']) / 2**30:.2f}",
    "seconds": lambda s: f"{s['wall_seconds']:.0f}",
}


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
    print(collect(sweep, options.out), end="")
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
            swept = [str(value) for value in override.sweep_string_iterator()] if override.is_sweep_override() else []
        key, _, value = text.partition("=")
        choices.append([(key, value, True) for value in swept] or [(key, value, False)])
    result = []
    for combination in product(*choices):
        values = {key: value for key, value, swept in combination if swept}
        name = "_".join(re.sub(r"[^\w.,=-]+", "-", f"{key}={value}") for key, value in values.items()) or "run"
        result.append(Job(values, tuple(f"{key}={value}" for key, value, _ in combination), out / name))
    return result


def collect(sweep: Sequence[Job], out: Path) -> str:
    """Write sweep.json and sweep.md. Return the latter, a table with a row for each finished run."""
    from petra.training import write_json

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


if __name__ == "__main__":
    main()
