"""A law of the penalty: ``python -m benchmarks.staleness.law RECORDS``.

How far above backpropagation does a cell end, in percent of backpropagation's loss? The law is fitted to some cells and tried on
others, which :func:`held_out` names: they were fixed before anything was fitted.
"""

from __future__ import annotations

from typing import Any

CALIBRATION = "j16_petra_k16_basis_rotation"
"""The one cell of basis rotation to which the law is fitted."""


def held_out(cell: str, setting: dict[str, Any]) -> str:
    """Return why a cell is held out, or nothing: all of k = 8, and all of basis rotation but one cell for calibration."""
    if setting["k"] == 8:
        return "k = 8"
    return "basis rotation" if setting["optimizer"] == "basis_rotation" and cell != CALIBRATION else ""
