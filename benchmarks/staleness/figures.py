"""Tables and the figure of the benchmark, from its records: ``python -m benchmarks.staleness.figures RECORDS [--out PICTURE]``.

Prints one row for each cell that has final runs, and the log of the search. PICTURE shows the loss on the test part against the
staleness of stage 1.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.staleness.cells import CELLS, HEADS
from launch.run.folder import records_in
from petra.analysis.plots import own_settings

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Half the width of a 95 % interval in standard errors, by the number of pairs (Student's t)."""

Records = Mapping[str, list[dict[str, Any]]]
"""Records by the name of their cell."""


def read_all(path: Path) -> Records:
    """Return all records in a folder or a file, in the order of the grid."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records_in(path).values():
        found[record["cell"]].append(record)
    return {cell.name: found[cell.name] for cell in CELLS if cell.name in found}


def final_runs(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the final runs of a cell with the rate and the warm-up that its search chose. Others belong to an earlier search."""
    runs = {
        is_final: [record for record in records if ("test" in record["bits_per_byte"]) == is_final] for is_final in (True, False)
    }
    longest = max((run["updates"] for run in runs[False]), default=0)
    tried = {(run["rate"], run["warmup"]): run["bits_per_byte"]["val"] for run in runs[False] if run["updates"] == longest}
    chosen = min(tried, key=lambda setting: tried[setting], default=None)
    return [run for run in runs[True] if chosen in (None, (run["rate"], run["warmup"]))]


def final(records: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Return the loss on the test part in bits per byte of each final run, by its seed."""
    return {run["seed"]: run["bits_per_byte"]["test"] for run in final_runs([*records])}


def difference(losses: Mapping[int, float], others: Mapping[int, float]) -> tuple[float, float] | None:
    """Return the mean difference of runs with the same seed, and half the width of its 95 % interval; None without two pairs."""
    pairs = [losses[seed] - others[seed] for seed in sorted(losses.keys() & others.keys())]
    if len(pairs) < 2:
        return None
    return statistics.fmean(pairs), STUDENT[len(pairs)] * statistics.stdev(pairs) / len(pairs) ** 0.5


def shown(losses: Mapping[int, float], others: Mapping[int, float]) -> str:
    """Return the mean difference with its interval as text, the difference alone of one pair, or nothing without pairs."""
    if (found := difference(losses, others)) is not None:
        return f"{found[0]:.2f} ± {found[1]:.2f}"
    return "".join(f"{losses[seed] - others[seed]:.2f}" for seed in losses.keys() & others.keys())


def base(cell: str, records: Records) -> dict[int, float]:
    """Return the final losses of backpropagation with the cell's stages, size and optimizer, with that optimizer's usual β₁.

    The network has the usual head.
    """
    own = {**records[cell][0]["setting"]}
    own["optimizer"] = own["optimizer"].partition("_b1=")[0]
    own["model"] = re.sub(f"_({'|'.join(HEADS)})$", "", own["model"])
    for found in records.values():
        setting = found[0]["setting"]
        same = all(setting[key] == own[key] for key in ("stages", "optimizer", "model"))
        if same and (setting["method"], setting["remedy"]) == ("backprop", "none"):
            return final(found)
    return {}


def results(records: Records) -> str:
    """Return a Markdown table of the cells that have final runs."""
    lines = [
        "| cell | staleness | seeds | learning rate | warm-up | test, bits per byte | above backprop | error of x̃ at stage 2 |",
        "|---" * 8 + "|",
    ]
    for cell, found in records.items():
        if not (losses := final(found)):
            continue
        runs = final_runs(found)
        spread = f" ± {statistics.stdev(losses.values()):.3f}" if len(losses) > 1 else ""
        exact = base(cell, records)
        above = "" if losses == exact else shown(losses, exact)
        errors = [statistics.fmean(run["reconstruction_error"]["2"]) for run in runs if run["reconstruction_error"].get("2")]
        cells = [
            f"`{cell}`",
            f"{runs[0]['staleness']:.2f}",
            str(len(losses)),
            f"{runs[0]['rate']:g}",
            f"{runs[0]['warmup']:.0%}",
            f"{statistics.fmean(losses.values()):.3f}{spread}",
            above,
            f"{statistics.fmean(errors):.2g}" if errors else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def best(records: Records, count: int = 3) -> str:
    """Return a Markdown table of the settings with the lowest loss of 16 stages, at a staleness of at most 1 and 4.

    A setting is tied with the first one if the interval of their difference contains 0.
    """
    lines = ["| staleness at most | setting | staleness | bits per byte | above backprop, % | |", "|---" * 6 + "|"]
    found = {
        cell.name: (final(records[cell.name]), final_runs(records[cell.name])[0]["staleness"])
        for cell in CELLS
        if cell.name in records
        and final(records[cell.name])
        and (cell.stages, cell.model, cell.remedy == "fitted") == (16, "revgpt", False)
    }
    for limit in (1.0, 4.0):
        stale = {name: losses for name, (losses, staleness) in found.items() if len(losses) > 2 and 0 < staleness <= limit}
        first, *_ = order = sorted(stale, key=lambda name: statistics.fmean(stale[name].values()))[:count]
        for name in order:
            gap, exact = difference(stale[name], base(name, records)), statistics.fmean(base(name, records).values())
            apart = difference(stale[name], stale[first]) or (0.0, 0.0)
            tied = "" if name == first else "tied with the first" if abs(apart[0]) <= apart[1] else "worse"
            stated = "" if gap is None else f"{100 * gap[0] / exact:.1f} ± {100 * gap[1] / exact:.1f}"
            loss = f"{statistics.fmean(stale[name].values()):.3f}"
            lines.append(f"| {limit:g} | `{name}` | {found[name][1]:.2f} | {loss} | {stated} | {tied} |")
    return "\n".join(lines)


def search(records: Records) -> str:
    """Return a Markdown table of the runs that chose learning rate and warm-up."""
    lines = ["| cell | updates | rate, warm-up: validation, bits per byte |", "|---|---|---|"]
    for cell, found in records.items():
        tried: dict[int, list[str]] = defaultdict(list)
        for run in sorted(found, key=lambda run: (run["updates"], run["warmup"], run["rate"])):
            if "test" not in run["bits_per_byte"]:
                tried[run["updates"]].append(f"{run['rate']:g}, {run['warmup']:.0%}: {run['bits_per_byte']['val']:.3f}")
        lines += [f"| `{cell}` | {updates} | {'; '.join(runs)} |" for updates, runs in tried.items()]
    return "\n".join(lines)


@own_settings()
def draw(records: Records, path: Path) -> None:
    """Draw the mean loss on the test part against the staleness: a panel for each optimizer, a line for each method and remedy."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = defaultdict(lambda: defaultdict(list))
    for found in records.values():
        setting, losses = found[0]["setting"], list(final(found).values())
        if losses and setting["stages"] == 16 and setting["model"] == "revgpt":
            delay = ", d = 1" if "_d1_" in found[0]["cell"] else ""
            delay += f", {setting['keep']}" if setting.get("keep") else ""
            remedy = "" if setting["remedy"] == "none" else f", {setting['remedy']}"
            spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
            points = panels[setting["optimizer"]][f"{setting['method']}{delay}{remedy}"]
            points.append((found[0]["staleness"], statistics.fmean(losses), spread))
    names = sorted({name for lines in panels.values() for name in lines})
    figure = Figure(figsize=(11, 7), layout="constrained")
    places = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, (optimizer, lines) in zip(places.flat, panels.items(), strict=False):
        for name, points in lines.items():
            x, y, spread = zip(*sorted(points), strict=True)
            i = names.index(name)
            axes.errorbar(x, y, spread, label=name, color=colormaps["tab20"](i), marker="os^D"[i % 4], capsize=3)
        axes.set(title=optimizer, xlabel="staleness of stage 1 (updates)", ylabel="test loss (bits per byte)")
        axes.grid(alpha=0.3)
    handles = {label: handle for axes in places.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend([handles[name] for name in names], names, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path)


def main() -> None:
    """Print the tables, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder or file of the records")
    parser.add_argument("--out", type=Path, help="file of the picture, .png or .svg")
    options = parser.parse_args()
    records = read_all(options.records)
    print(f"{results(records)}\n\n{best(records)}\n\n{search(records)}")
    if options.out is not None:
        draw(records, options.out)


if __name__ == "__main__":
    main()
