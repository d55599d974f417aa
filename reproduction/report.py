"""The request for a reproduction and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from petra.analysis.plots import Panel
from petra.errors import require


class Scale(StrEnum):
    """Size of a reproduction."""

    PAPER = "paper"
    """As published. Targets that train need GPUs and days."""
    CPU = "cpu"
    """A smaller version, which two CPU cores finish in minutes to hours. Each target states what is smaller."""


@dataclass(frozen=True)
class Request:
    """The arguments of one command.

    Attributes:
        overrides: Overrides of the configuration of every run. They take precedence over those of the target.
        out: Folder of the results. Runs are in its subfolder ``runs``.
        folders: Further folders with finished runs that may be used, or files of records.
        processes: Number of processes of each run on this machine.
        gather: Train nothing; use only finished runs.
    """

    scale: Scale
    out: Path
    overrides: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    processes: int = 1
    gather: bool = False

    def require_gpus(self, count: int, smaller: str) -> None:
        """Check that this machine has the GPUs that training at the paper's scale needs.

        Args:
            count: Number of GPUs.
            smaller: What scale=cpu runs instead.

        Raises:
            ConfigError: If this machine has fewer GPUs.
        """
        found = torch.cuda.device_count()
        enough = self.scale is not Scale.PAPER or self.gather or found >= count
        require(enough, "scale", f"cpu ({smaller}), or paper with at least {count} GPU(s)", f"paper with {found} GPU(s)")


@dataclass(frozen=True)
class Report:
    """The result of a target.

    Attributes:
        text: Markdown.
        data: The figures that the text shows, for JSON.
        panels: Diagrams to draw. If there are none, no picture is written.
        columns: Number of diagrams in a row.
        shaded: See :func:`petra.analysis.plots.grid`.
    """

    text: str
    data: Any
    panels: Sequence[Panel] = field(default=())
    columns: int = 2
    shaded: bool = False


def ran(request: Request, smaller: str) -> str:
    """Return a sentence that states the scale of a target that trains.

    Args:
        smaller: What scale=cpu runs.
    """
    changed = [word for word in request.overrides if not word.startswith("data.root=")]
    words = "".join(f" `{word}`" for word in changed)
    scale = "`scale=paper`, as in the paper" if request.scale is Scale.PAPER else f"`scale=cpu`, {smaller}"
    return f"Ours: {scale}{', with' + words if words else ''}."


@dataclass(frozen=True)
class Target:
    """One table or figure.

    Attributes:
        make: Function that makes the report. Raises PetraError if this machine can't meet the request.
        trains: Whether the target trains networks, and so takes overrides and folders of runs.
    """

    title: str
    make: Callable[[Request], Report]
    trains: bool = False
