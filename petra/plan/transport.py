"""Choice of the transport of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from petra.errors import require
from petra.settings import TransportName


def choose_transport(name: TransportName, processes: int, delays: Sequence[int]) -> TransportName:
    """Return the transport of a pipeline.

    Args:
        name: Requested transport. ``auto`` selects ``local`` in one process, ``lockstep`` if d = 2 at every boundary, and
            ``edge`` otherwise.
        processes: Number of processes of a replica.
        delays: Delay d of each boundary.

    Raises:
        ConfigError: If the named transport does not fit the number of processes.
    """
    if processes == 1:
        require(name in ("auto", "local"), "transport", "auto or local in one process", name)
        return "local"
    require(name != "local", "transport", f"auto, lockstep or edge in {processes} processes", name)
    if name == "auto":
        return "lockstep" if delays and set(delays) == {2} else "edge"
    return name


def simulated_transport(name: TransportName, delays: Sequence[int]) -> Literal["edge", "lockstep"]:
    """Return the transport that a run with one process for each stage would use, given the delay d of each boundary."""
    several = 2  # any number of processes above 1 gives the same choice
    chosen = choose_transport("auto" if name == "local" else name, several, delays)
    return "lockstep" if chosen == "lockstep" else "edge"
