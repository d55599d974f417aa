"""Targets computed from tensor shapes: PETRA's Tables 3 and 6. Both scales are the same."""

from __future__ import annotations

from collections.abc import Callable

import torch

from petra.analysis import memory
from petra.model import Model
from petra.models import revnet18, revnet34, revnet50
from petra.specs import TensorSpec

from ..run.markdown import table
from .paper import TABLE3
from .report import Report, Request

IMAGENET = TensorSpec((64, 3, 224, 224), torch.float32)
MODELS: dict[str, Callable[..., Model]] = {"revnet18": revnet18, "revnet34": revnet34, "revnet50": revnet50}


def table3(request: Request) -> Report:
    """Compare the total memory of delayed gradients with and without buffers (PETRA, Table 3)."""
    model = revnet50(classes=1000, stem="imagenet")
    totals = {row: sum(stages) / 1e9 for row, stages in memory.table3(model, IMAGENET).items()}
    both_streams = {row: value / 1e9 for row, value in memory.buffers(model, IMAGENET).items()}
    largest = totals[True, True]
    lines = [
        [*_yes_no(row), f"{value:.2f}", f"{100 * (1 - value / largest):.1f}", *map(str, TABLE3[row]), f"{both_streams[row]:.1f}"]
        for row, value in totals.items()
    ]
    header = ("input buffers", "parameter buffers", "GB", "saved, %", "paper, GB", "paper, %", "buffers of both streams, GB")
    note = "RevNet-50, ImageNet, batch 64, float32, k = 1, one block per stage. Both scales are the same."
    return Report(f"{table(header, lines)}\n{note}\n", [{"inputs": x, "parameters": p, "GB": v} for (x, p), v in totals.items()])


def table6(request: Request) -> Report:
    """List the memory of Table 3 by stage, for the paper's three networks (PETRA, Table 6)."""
    parts, data = [], {}
    for name, build in MODELS.items():
        model = build(classes=1000, stem="imagenet")
        profiles, found = model.profile(IMAGENET), memory.table3(model, IMAGENET)
        data[name] = [{"inputs": x, "parameters": p, "bytes": stages} for (x, p), stages in found.items()]
        lines = [
            [str(j + 1), p.name, "yes" if p.reversible else "no", *(f"{found[row][j] / 1e9:.2f}" for row in TABLE3)]
            for j, p in enumerate(profiles)
        ]
        lines.append(["all", "", "", *(f"{sum(found[row]) / 1e9:.2f}" for row in TABLE3)])
        header = ("stage", "block", "reversible", "inputs and parameters buffered", "inputs", "parameters", "neither: PETRA")
        parts.append(f"{name}, GB:\n\n{table(header, lines)}")
    note = "ImageNet, batch 64, float32, k = 1, computed as in Table 3. The paper's figures were not available. Both scales agree."
    return Report("\n".join([*parts, note]) + "\n", data)


def _yes_no(row: tuple[bool, bool]) -> list[str]:
    return ["yes" if value else "no" for value in row]
