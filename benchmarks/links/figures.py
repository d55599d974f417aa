"""The table and the figure, from records: ``python -m benchmarks.links.figures RECORDS [RECORDS ...] [--out PICTURE]``.

RECORDS are folders or files of ``benchmarks.links``, and of ``benchmarks.staleness`` for the cells of full streams. A row compares
a cell with PETRA's full streams in float32 and x̃ sent, of as many parameters and the same staleness, seed by seed. PICTURE shows
the bits per byte above these against the bytes per token in the busier direction of a boundary.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.links.cells import CELLS, LinkCell, bytes_per_token
from benchmarks.staleness.figures import difference, final, final_runs
from launch.run.folder import records_in
from petra.analysis.plots import own_settings

Records = Mapping[str, Sequence[dict[str, Any]]]
GOALS = ((8, 1.01), (16, 1.02), (32, 1.04))
"""How many times fewer bytes, and the largest ratio of the bits per byte that is wanted there."""


@dataclass(frozen=True)
class Point:
    """A cell beside its baseline.

    Attributes:
        forward, backward: Bytes per token.
        less: How many times fewer bytes than those of the baseline, in the busier direction.
        bits: Mean bits per byte on the test part.
        above: Mean difference from the baseline's, of the same seeds.
        half: Half the width of its 95 % interval; None for one seed.
        ratio: Mean ratio of the bits per byte.
        searched: Whether the learning rate is the best one of a search.
    """

    cell: LinkCell
    forward: float
    backward: float
    less: float
    seeds: int
    rate: float
    bits: float
    above: float
    half: float | None
    ratio: float
    searched: bool


def read_all(paths: Sequence[Path]) -> Records:
    """Return the records of some folders and files by cell. The first one of each name counts."""
    named: dict[str, dict[str, Any]] = {}
    for path in paths:
        named = records_in(path) | named
    found = defaultdict(list)
    for _, record in sorted(named.items()):
        found[record["cell"]].append(record)
    return found


def points(records: Records) -> list[Point]:
    """Return the cells that have a seed in common with their baseline, in the order of the cells."""
    found = []
    for cell in CELLS:
        own, base = (final(records.get(name, ())) for name in (cell.name, cell.baseline.name))
        pairs = [(own[seed], base[seed]) for seed in sorted(own.keys() & base.keys())]
        if not pairs or cell.name == cell.baseline.name:
            continue
        sent, all_sent = bytes_per_token(cell), bytes_per_token(cell.baseline)
        bits, above, ratio = (statistics.fmean(values) for values in zip(*((a, a - b, a / b) for a, b in pairs), strict=True))
        rate, searched = (
            final_runs([*records[cell.name]])[0]["rate"],
            len(final_runs([*records[cell.name]])) < len(records[cell.name]),
        )
        interval = difference(own, base)
        half = None if interval is None else interval[1]
        less = max(all_sent) / max(sent)
        found.append(Point(cell, *sent, less, len(pairs), rate, bits, above, half, ratio, searched))
    return found


def table(found: Sequence[Point]) -> str:
    """Return Markdown. Goals are met or not by the means."""
    head = "cell | B/token forward | back | times fewer | seeds | rate | bits per byte | above | ratio | goal"
    lines = [f"| {head} |", "|---" * 10 + "|"]
    for p in found:
        above = f"{p.above:.3f}" + ("" if p.half is None else f" ± {p.half:.3f}")
        rate = f"{p.rate:g}" + ("" if p.searched else " (not searched)")
        wanted = next((f"{most:g}" for least, most in reversed(GOALS) if p.less >= least), "")
        sent = f"{p.forward:.1f} | {p.backward:.1f} | {p.less:.1f}"
        lines.append(f"| `{p.cell.name}` | {sent} | {p.seeds} | {rate} | {p.bits:.3f} | {above} | {p.ratio:.3f} | {wanted} |")
    return "\n".join(lines)


@own_settings()
def draw(found: Sequence[Point], path: Path) -> None:
    """Draw a panel for each k and width, with a mark for each method and each kind of streams and messages."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for p in found:
        cell = p.cell
        width = 112 if cell.model.endswith("_2m") else 56
        streams = "full streams" if cell.stream is None else "narrow streams"
        kind = [f"{cell.model}, " * cell.model.startswith("gpt") + cell.method, streams]
        kind += ["few bits"] if cell.x or cell.delta else []
        kind += [f"inputs stored as {cell.stored}"] if cell.stored else []
        panels[f"width {width}, k = {cell.k}"][", ".join(kind)].append(p)
    kinds = sorted({kind for lines in panels.values() for kind in lines})
    columns, rows = (2 if len(panels) > 1 else 1), max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(4.5 * columns + 2.5, 4.0 * rows), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for axes, (title, lines) in zip(places, sorted(panels.items()), strict=False):
        for name, own in lines.items():
            i = kinds.index(name)
            x, above = [max(p.forward, p.backward) for p in own], [p.above for p in own]
            halves = [p.half or 0.0 for p in own]
            axes.errorbar(x, above, halves, label=name, color=f"C{i}", marker="os^Dvx"[i % 6], ls="none", capsize=3)
        axes.set(title=title, xlabel="bytes per token, busier direction", ylabel="bits per byte above the baseline")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.axhline(0, color="grey", lw=0.8)
        axes.grid(alpha=0.3)
    labelled = {name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend([labelled[kind] for kind in kinds], kinds, loc="outside right upper", fontsize="x-small")
    figure.savefig(path)


def main() -> None:
    """Print the table, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="folders or files of records")
    parser.add_argument("--out", type=Path, help="file of the picture, .png or .svg")
    options = parser.parse_args()
    found = points(read_all(options.records))
    print(table(found))
    if options.out is not None:
        draw(found, options.out)


if __name__ == "__main__":
    main()
