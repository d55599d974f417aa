"""Choice of the transport of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from petra.errors import require
from petra.settings import TransportName

MOST_WITH_EDGE = 64
"""Largest number of processes for ``edge``. All of them take part in opening the communicators of all boundaries."""


def choose_transport(
    name: TransportName, processes: int, delays: Sequence[int], device_type: str = "cpu", world: int = 1
) -> TransportName:
    """Return the transport of a pipeline.

    On GPUs, ``auto`` never selects ``edge``, whose posted receives occupy the device until their messages come: the first launch of
    a kernel may wait until the device is idle, and then neither ends. ``lockstep`` needs only what every rank has launched.

    Args:
        name: Requested transport. ``auto`` selects ``local`` in one process. In several, it selects ``lockstep`` on GPUs, or if
            d = 2 at every boundary, or for more than :data:`MOST_WITH_EDGE` processes, and ``edge`` otherwise.
        processes: Number of processes of a replica.
        delays: Delay d of each boundary.
        device_type: ``cpu`` or ``cuda``.
        world: Number of processes of all replicas together.

    Raises:
        ConfigError: If the named transport does not fit the number of processes.
    """
    if processes == 1:
        require(name in ("auto", "local"), "transport", "auto or local in one process", name)
        return "local"
    few = (total := max(world, processes)) <= MOST_WITH_EDGE
    expected = f"{'auto, lockstep or edge' if few else 'auto or lockstep'} in {total} processes"
    require(name in ("auto", "lockstep") or (few and name == "edge"), "transport", expected, name)
    if name == "auto":
        return "edge" if few and device_type != "cuda" and set(delays) != {2} else "lockstep"
    return name


def simulated_transport(
    name: TransportName, delays: Sequence[int], device_type: str = "cpu", processes: int | None = None
) -> Literal["edge", "lockstep"]:
    """Return the transport of a run in so many processes, by default one for each stage, given the delay d of each boundary."""
    chosen = choose_transport("auto" if name == "local" else name, max(2, processes or len(delays) + 1), delays, device_type)
    return "lockstep" if chosen == "lockstep" else "edge"
