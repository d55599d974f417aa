"""The page and the table of ``petra bench gpu``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from petra.analysis.plots import Panel, grid, svg
from petra.training.records import write_text_atomically

from ..run.page import page_template
from ..runtime.terminal import table
from .measure import ALONE

BASES = (ALONE, "torch 1F1B")
"""Contestants with which all are compared."""
HEADER = (
    *("case", "contestant", "microbatch", "samples/s: min", "median", "max", *(f"× {name}" for name in BASES), "idle (%)"),
    *("host (µs)", "messages (GB/s)", "reserved (GB)", "of prediction"),
)
Found = Mapping[str, Any]
"""Figures of a run, as in bench.json."""


def rows(found: Found) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each contestant."""
    for case, entries in found["cases"].items():
        for name, entry in entries.items():
            if not (speeds := entry["rounds"]):
                yield case, name, "none", *[""] * (len(HEADER) - 3)
                continue
            pairs = [list(zip(speeds, entries.get(other, {"rounds": ()})["rounds"], strict=False)) for other in BASES]
            sizes = entry.get("reserved", ())
            reserved, predicted = max(zip(sizes, entry.get("predicted", [0] * len(sizes)), strict=False), default=(0, 0))
            yield (
                *(case, name, str(entry["batch"]), *(f"{f(speeds):.4g}" for f in (min, median, max))),
                *(f"{median(a / b for a, b in pair):.2f}" if pair else "" for pair in pairs),
                f"{100 * max(entry['idle']):.0f}",
                f"{entry['host_us']:.0f}" if "host_us" in entry else "",
                f"{entry['gbps']:.3g}",
                f"{reserved / 1e9:.3g}" if reserved else "",
                f"{reserved / predicted:.2f}" if predicted else "",
            )


def failures(found: Found) -> list[str]:
    """Return a line for each reason why measurements were not completed, with the contestants."""
    named: dict[str, list[str]] = {}
    for case, entries in found["cases"].items():
        for name, entry in entries.items():
            named.setdefault(entry["error"], []).append(f"{case}: {name}")
    return [f"{error} ({'; '.join(names)})" for error, names in named.items() if error]


def as_table(found: Found) -> str:
    """Return the table of all contestants, in Markdown, and the failures."""
    return "\n".join([table(HEADER, rows(found), aligned=True), *failures(found)])


def panels(found: Found) -> Iterator[Panel]:
    """Yield the diagrams: speed, search and idle time of each case."""
    for case, entries in found["cases"].items():
        if measured := {name: entry for name, entry in entries.items() if entry["rounds"]}:
            speeds = {name: [(i, median(entry["rounds"]))] for i, (name, entry) in enumerate(measured.items())}
            idle = {name: [(i, 100 * max(entry["idle"]))] for i, (name, entry) in enumerate(measured.items())}
            searched = {name: [(int(size), speed) for size, speed in entry["sizes"].items()] for name, entry in measured.items()}
            yield Panel("", f"{case}: samples/s", speeds, bars=True)
            yield Panel("samples per microbatch", f"{case}: samples/s in the search", searched, powers=True)
            yield Panel("", f"{case}: idle (%)", idle, bars=True)


def write_page(found: Found, path: Path) -> None:
    """Write the page."""
    kind = f"{found['devices']} GPU(s)" if found["gpus"] else f"{found['devices']} processes on the CPU"
    warning = "Small networks: these figures say nothing about GPUs. " * found["tiny"]
    versions = ", ".join(f"{name} {value}" for name, value in found["machine"]["versions"].items())
    drawn = list(panels(found))
    page = page_template("bench.html").render(
        name=f"petra bench gpu: {kind}",
        sentence=f"{warning}{found['machine']['device']}, {versions}. Computation in bf16.",
        header=HEADER,
        rows=list(rows(found)),
        failures=failures(found),
        picture=svg(grid(drawn, columns=3)) if drawn else "",
    )
    write_text_atomically(path, page.lstrip())
