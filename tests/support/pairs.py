"""Tests of many settings without their full product."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each axis, such that any two values of two axes occur together in a row."""
    rows = [*product(*(range(len(axis)) for axis in axes))]
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return [tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in chosen]
