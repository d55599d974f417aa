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

    On GPUs, ``auto`` never selects ``edge``, which posts receives before their messages are due. A posted NCCL receive occupies the
    device until the message arrives. The first launch of any other kernel may load its module, which can wait until the device is
    idle, and then neither ends. An exchange of ``lockstep`` depends only on steps of rounds that every rank has already launched.

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
    total = max(world, processes)
    few = total <= MOST_WITH_EDGE
    expected = f"{'auto, lockstep or edge' if few else 'auto or lockstep'} in {total} processes"
    require(name in ("auto", "lockstep") or (few and name == "edge"), "transport", expected, name)
    if name == "auto":
        return "edge" if few and device_type != "cuda" and set(delays) != {2} else "lockstep"
    return name


def simulated_transport(name: TransportName, delays: Sequence[int], device_type: str = "cpu") -> Literal["edge", "lockstep"]:
    """Return the transport that a run with one process for each stage would use, given the delay d of each boundary."""
    chosen = choose_transport("auto" if name == "local" else name, max(2, len(delays) + 1), delays, device_type)
    return "lockstep" if chosen == "lockstep" else "edge"
