"""A law of the penalty: ``python -m benchmarks.staleness.law RECORDS``.

How far above backpropagation does a cell end, in percent of backpropagation's loss? The law is

    penalty = c(optimizer) · s^p · (stashed weights) · (reconstruction) · (remedy),

where s is the mean staleness of the stages in updates. It is linear in logarithms, fitted by least squares with weights from the
spread over seeds, and tried on cells that :func:`held_out` names, which were fixed before anything was fitted. Rivals on the same
cells are a line between the neighbouring staleness of the same method, optimizer and remedy, and Muon's cells times a constant from
the one cell of calibration.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.staleness.cells import CELLS
from benchmarks.staleness.figures import STUDENT, Records, base, difference, final, read_all
from petra import Weights

CALIBRATION = "j16_petra_k16_basis_rotation"
"""The one cell of basis rotation to which the law is fitted."""
FLOOR = 0.1
"""Smallest standard error of a penalty in percent that counts: three seeds may agree by chance."""


def held_out(cell: str, setting: dict[str, Any]) -> str:
    """Return why a cell is held out, or nothing: all of k = 8, and all of basis rotation but one cell for calibration."""
    if setting["k"] == 8:
        return "k = 8"
    return "basis rotation" if setting["optimizer"] == "basis_rotation" and cell != CALIBRATION else ""


@dataclass(frozen=True)
class Penalty:
    """How far a cell with several seeds ends above backpropagation.

    Attributes:
        staleness: Mean over the stages, in updates.
        percent: Mean over the seeds, in percent of backpropagation's loss.
        error: Standard error of the mean.
        half: Half the width of the 95 % interval.
        features: Names of the constants whose logarithms add up, beside the power of the staleness.
    """

    cell: str
    setting: dict[str, Any]
    staleness: float
    percent: float
    error: float
    half: float
    features: tuple[str, ...]


def penalties(records: Records) -> list[Penalty]:
    """Return the penalties of the cells of the small networks with at least two seeds, in the order of the grid."""
    found = []
    for cell in CELLS:
        losses, exact = (final(records[cell.name]), base(cell.name, records)) if cell.name in records else ({}, {})
        own = {"adamw", "muon", "nadam", "basis_rotation"} >= {cell.optimizer}
        pairs = difference(losses, exact)
        if pairs is None or cell.model != "revgpt" or cell.method == "backprop" or not own:
            continue
        method, scale = cell.make_method(), 100 / statistics.fmean(exact.values())
        delays = method.delays(cell.stages, cell.k)
        staleness = statistics.fmean(method.staleness(delay, cell.k) for delay in delays)
        half = scale * pairs[1]
        error = max(FLOOR, half / STUDENT[len(losses.keys() & exact.keys())])
        keep = cell.keep or method.keep
        features = [cell.optimizer]
        features += ["stashed"] * (method.weights is Weights.STASHED) + ["reconstruction"] * (keep == "nothing")
        features += [] if cell.remedy == "none" else ["feedback" if cell.remedy == "feedback" else "prediction"]
        setting = records[cell.name][0]["setting"]
        found.append(Penalty(cell.name, setting, staleness, scale * pairs[0], error, half, tuple(features)))
    return found


def fit(cells: Sequence[Penalty]) -> dict[str, float]:
    """Return the power of the staleness, and the constants."""
    cells = [cell for cell in cells if cell.percent > 0]  # none of the fitted ones is below
    names = sorted({name for cell in cells for name in cell.features})
    rows = [[math.log(cell.staleness), *(float(name in cell.features) for name in names)] for cell in cells]
    weights = np.array([cell.percent / cell.error for cell in cells])  # errors of a logarithm are relative
    logs = np.log([cell.percent for cell in cells])
    solved = np.linalg.lstsq(np.array(rows) * weights[:, None], logs * weights, rcond=None)[0]
    return {"power": float(solved[0]), **{name: math.exp(value) for name, value in zip(names, solved[1:], strict=True)}}


def predicted(law: Mapping[str, float], cell: Penalty) -> float:
    """Return the penalty by the law, in percent."""
    return math.prod([cell.staleness ** law["power"], *(law[name] for name in cell.features)])


def interpolated(cell: Penalty, others: Sequence[Penalty]) -> float | None:
    """Return the line between the neighbouring staleness of the same kind, or None without two neighbours or an equal one."""
    curve = {
        each.staleness: each.percent for each in others if _same(each, cell, "method", "stages", "optimizer", "remedy", "keep")
    }
    if cell.staleness in curve:
        return curve[cell.staleness]
    below, above = [s for s in curve if s < cell.staleness], [s for s in curve if s > cell.staleness]
    if not below or not above:
        return None
    low, high = max(below), min(above)
    share = math.log(cell.staleness / low) / math.log(high / low)
    return curve[low] + share * (curve[high] - curve[low])


def scaled(cell: Penalty, others: Sequence[Penalty]) -> float | None:
    """Return the penalty of the same cell with Muon, times a constant that is right for :data:`CALIBRATION`."""
    alike = [each for each in others if _same(each, cell, "method", "stages", "k", "remedy", "keep")]
    like = {each.setting["optimizer"]: each.percent for each in alike}
    known = {each.cell: each.percent for each in others}
    muon = CALIBRATION.replace("basis_rotation", "muon")
    return like["muon"] * known[CALIBRATION] / known[muon] if "muon" in like else None


def _same(one: Penalty, other: Penalty, *keys: str) -> bool:
    return all(one.setting.get(key) == other.setting.get(key) for key in keys)


def trials(cells: Sequence[Penalty]) -> list[tuple[Penalty, str, float, float | None]]:
    """Return the cells that are held out, why, and their penalties by the law and by the rival."""
    fitted = [cell for cell in cells if not held_out(cell.cell, cell.setting)]
    law = fit(fitted)
    rivals: dict[str, Callable[[Penalty, Sequence[Penalty]], float | None]] = {"k = 8": interpolated, "basis rotation": scaled}
    found = [(cell, held_out(cell.cell, cell.setting)) for cell in cells]
    return [(cell, why, predicted(law, cell), rivals[why](cell, fitted)) for cell, why in found if why]


def table(cells: Sequence[Penalty]) -> str:
    """Return Markdown: the constants, the cells that are held out, and the mean errors."""
    fitted = [cell for cell in cells if not held_out(cell.cell, cell.setting)]
    law, tried = fit(fitted), trials(cells)
    within = statistics.fmean(abs(predicted(law, cell) - cell.percent) for cell in fitted)
    lines = [f"{len(law)} constants, {len(fitted)} cells, mean error {within:.2f} points:", ""]
    lines += [f"| {' | '.join(law)} |", "|---" * len(law) + "|", f"| {' | '.join(f'{value:.2f}' for value in law.values())} |", ""]
    lines += ["| held out | why | mean staleness | above backprop, % | law | rival |", "|---" * 6 + "|"]
    for cell, why, by_law, by_rival in tried:
        rival = "" if by_rival is None else f"{by_rival:.1f}"
        stated = f"{cell.percent:.1f} ± {cell.half:.1f}"
        lines.append(f"| `{cell.cell}` | {why} | {cell.staleness:.2f} | {stated} | {by_law:.1f} | {rival} |")
    lines += ["", "| cells with a rival | number | mean error of the law, points | of the rival |", "|---|---|---|---|"]
    for why in dict.fromkeys(why for _, why, _, _ in tried):
        errors = [
            (abs(law - c.percent), abs(rival - c.percent)) for c, reason, law, rival in tried if reason == why and rival is not None
        ]
        means = " | ".join(f"{statistics.fmean(each):.2f}" for each in zip(*errors, strict=True))
        lines.append(f"| {why} | {len(errors)} | {means} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder or file of the records")
    print(table(penalties(read_all(parser.parse_args().records))))


if __name__ == "__main__":
    main()
