"""Write the report of a run, finished or not: ``petra report RUN`` writes RUN/report.html."""

from __future__ import annotations

from .run.page import write_report
from .runtime.terminal import command, parser_for, path_argument


@command
def main(arguments: list[str] | None = None) -> None:
    """Write the report of each run, and print its path."""
    parser = parser_for(__doc__)
    parser.add_argument("runs", nargs="+", type=path_argument, metavar="RUN", help="folder of a run")
    options = parser.parse_args(arguments)
    for folder in options.runs:
        print(write_report(folder))
