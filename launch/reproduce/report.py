"""What is asked of a reproduction, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from petra.analysis.plots import Panel
from petra.errors import ConfigError


class Scale(StrEnum):
    PAPER = "paper"
    """As published: needs GPUs and days, where it trains."""
    CPU = "cpu"
    """A smaller version that two cores finish in minutes to hours, which each target states."""


@dataclass(frozen=True)
class Request:
    """A command line.

    Attributes:
        overrides: of the configuration of all runs, behind the target's own.
        out: folder of the results, with the runs in ``runs``.
        folders: where finished runs may be taken from, beside ``out``.
        processes: of each run on this machine.
        gather: train nothing.
    """

    scale: Scale
    out: Path
    overrides: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    processes: int = 1
    gather: bool = False

    def require_gpus(self, count: int, smaller: str) -> None:
        """For training at the paper's scale.

        Raises:
            ConfigError: this machine has fewer; says in one line what scale=cpu does instead.
        """
        found = torch.cuda.device_count()
        if self.scale is Scale.PAPER and not self.gather and found < count:
            raise ConfigError(f"scale: found paper with {found} GPU(s), accepted is paper with {count} or more, or cpu: {smaller}")


@dataclass(frozen=True)
class Report:
    """A result.

    Attributes:
        text: Markdown.
        data: what the text was made from, for JSON.
        panels: to draw; none for no picture.
        columns: of the picture.
        shaded: as :func:`petra.analysis.plots.panels`.
    """

    text: str
    data: Any
    panels: Sequence[Panel] = field(default=())
    columns: int = 2
    shaded: bool = False


@dataclass(frozen=True)
class Target:
    """One table or figure.

    Attributes:
        make: may raise PetraError for a request that can't be met here.
        trains: takes overrides, and folders of runs.
    """

    title: str
    make: Callable[[Request], Report]
    trains: bool = False
