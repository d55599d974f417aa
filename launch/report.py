"""Write the report of a run, finished or not: ``petra report RUN`` writes RUN/report.html."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from petra.errors import PetraError

from .run.report import write_report


def main(arguments: list[str] | None = None) -> None:
    """Write the report of each run, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    options = parser.parse_args(arguments)
    try:
        for folder in options.runs:
            print(write_report(folder))
    except PetraError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
