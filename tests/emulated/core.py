"""Divides the matrix of emulated tests into a core, which ``make test`` runs, and the rest, which ``make stress`` adds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def core(values: Iterable[Any], kept: Collection[int]) -> list[Any]:
    """Return the values of a parametrized test. Those whose index is not in ``kept`` have the mark ``stress``."""
    pairs = [(i, value if isinstance(value, tuple) else (value,)) for i, value in enumerate(values)]
    return [pytest.param(*value, marks=[] if i in kept else pytest.mark.stress) for i, value in pairs]
