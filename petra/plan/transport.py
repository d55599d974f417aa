"""The transport that a plan uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from petra.errors import require
from petra.settings import TransportName


def choose_transport(name: TransportName, processes: int, delays: Sequence[int]) -> TransportName:
    """Return the transport for a pipeline over ``processes`` with these boundary delays.

    ``auto`` selects ``local`` in one process, ``lockstep`` if d = 2 at every boundary, and ``edge`` otherwise.

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
    """Return the transport that a run with one process per stage would use."""
    chosen = choose_transport("auto" if name == "local" else name, 2, delays)
    return "lockstep" if chosen == "lockstep" else "edge"
