"""Search for a partition that fits into memory: partitions are compared by estimates, and the one that is found is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from petra.cost_model.memory import PredictedMemory
from petra.errors import ConfigError, invalid

Found = TypeVar("Found")
SEARCHES = 4
"""Searches for a partition that fits."""


def search_within(
    limits: Sequence[float],
    search: Callable[[Sequence[float]], Found],
    estimate: Callable[[Found], Sequence[float]],
    count: Callable[[Found], Sequence[PredictedMemory]],
    key: str,
    place: str,
) -> tuple[Found, list[PredictedMemory]]:
    """Search for a partition whose stages need at most ``limits`` bytes.

    A search compares many ranges of blocks by estimates of their memory. Then the memory of the partition found is counted. If a
    stage needs more than its limit, the next search must find an estimate for it that is smaller by the excess.

    Args:
        limits: Bytes available to each stage.
        search: Returns a partition that fits limits by estimates.
        estimate: Returns the estimated bytes of each stage of a partition.
        count: Returns the memory of each stage of a partition.
        key, place: What an error names: the setting, and what has the limits (``stage`` or ``device``).

    Returns:
        The partition and the memory of its stages.

    Raises:
        ConfigError: If none of a few partitions fits.
    """
    limited = list(limits)
    needs: list[float] = []
    for _ in range(SEARCHES):
        try:
            found = search(limited)
        except ConfigError:
            if not needs:
                raise
            break  # nothing fits the smaller limits by the estimates
        memory = list(count(found))
        needs = [counted.total for counted in memory]
        if all(need <= limit for need, limit in zip(needs, limits, strict=True)):
            return found, memory
        rows = zip(limited, estimate(found), needs, limits, strict=True)
        limited = [now if need <= limit else estimated - (need - limit) for now, estimated, need, limit in rows]
    worst = max(range(len(limits)), key=lambda j: needs[j] / limits[j])
    raise invalid(key, f"at least {needs[worst] / 1e9:.3g} GB for {place} {worst + 1}", f"{limits[worst] / 1e9:.3g} GB")
