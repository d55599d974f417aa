"""Train once for each combination of values: ``petra sweep k=1,2,4 model=revnet18,revnet34``.

Values separated by commas are swept. All other overrides apply to every run (the syntax is Hydra's). Each run has processes and,
under --out, a folder of its own, and a failing run doesn't end the others, unlike with ``petra train --multirun``. Run the same
command again to continue an interrupted sweep: finished runs are skipped, unfinished ones resume from their last checkpoint.
The table at the end is that of ``petra compare``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from petra.errors import require

from .compare import compare
from .config.compose import hydra_errors, require_arguments
from .run.jobs import Job, train_jobs
from .runtime.terminal import command, parser_for


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
