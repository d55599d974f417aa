"""Merge the records of runs into one file: ``python -m benchmarks.records FOLDER [FOLDER ...] FILE.jsonl``.

A benchmark that trains writes a JSON file for each run into its folder ``--out``, which several processes may share. FILE.jsonl has
a line for each record, with its name, in the order of the names, so a new record is a new line. A FILE.jsonl that exists is added
to. Programs that read records take a folder or such a file. If the last argument is a folder, it receives the single files again,
for a benchmark that adds runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.run.folder import records_in
from launch.runtime.terminal import command, parser_for
from petra.errors import require
from petra.training.records import write_json, write_text_atomically

RECORDS = Path(__file__).parents[1] / "docs" / "evidence" / "records"
"""Folder of the records that are kept."""


def recorded(out: Path, name: str, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a record of ``out``, trained now unless it is there.

    Args:
        out: Folder with a file for each record, or a file of JSON lines, which is only read.

    Raises:
        ConfigError: If it has to be trained and ``out`` is not a folder.
    """
    if out.suffix == ".jsonl":
        found = records_in(out)
        require(name in found, "--out", f"a folder, to train {name}, or a file with that record", out)
        return found[name]
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    if not path.exists():
        write_json(path, train())
    return dict(json.loads(path.read_text(encoding="utf-8")))


def merge(sources: Sequence[Path], file: Path) -> int:
    """Add the records of folders or files to a file of JSON lines or to a folder, and return how many it has.

    Raises:
        ConfigError: If two different records have the same name.
    """
    found: dict[str, dict[str, Any]] = {}
    for source in (*([file] if file.exists() else []), *sources):
        for name, record in records_in(source).items():
            require("name" not in record, str(source), "records without a key name", name)
            require(_line(name, found.get(name, record)) == _line(name, record), str(source), "equal records of equal names", name)
            found[name] = record
    in_lines = file.suffix == ".jsonl"
    (file.parent if in_lines else file).mkdir(parents=True, exist_ok=True)
    if in_lines:
        write_text_atomically(file, "".join(_line(name, found[name]) for name in sorted(found)))
    else:
        for name, record in found.items():
            write_json(file / f"{name}.json", record)
    return len(found)


def _line(name: str, record: dict[str, Any]) -> str:
    return json.dumps({"name": name, **record}, separators=(",", ":")) + "\n"


@command
def main(arguments: list[str] | None = None) -> None:
    """Merge, and print the number of records."""
    parser = parser_for(__doc__)
    parser.add_argument("sources", type=Path, nargs="+", metavar="FOLDER", help="folders or files of records")
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="file of JSON lines to write, or a folder")
    options = parser.parse_args(arguments)
    print(f"{options.file}: {merge(options.sources, options.file)} records")


if __name__ == "__main__":
    main()
