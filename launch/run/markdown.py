"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, aligned: bool = False) -> str:
    """Return a Markdown table, which ends with a newline. Columns that are ``aligned`` line up in a terminal."""
    cells = [header, ["---"] * len(header), *rows]
    widths = [aligned * max(map(len, column)) for column in zip(*cells, strict=True)]
    return "".join("| " + " | ".join(map(str.ljust, line, widths)) + " |\n" for line in cells)
