"""Choice of the transport of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from petra.errors import require
from petra.settings import TransportName


def choose_transport(name: TransportName, processes: int, delays: Sequence[int], device_type: str = "cpu") -> TransportName:
    """Return the transport of a pipeline.

    On GPUs, ``auto`` never selects ``edge``, which posts receives before their messages are due. A posted NCCL receive occupies the
    device until the message arrives. The first launch of any other kernel may load its module, which can wait until the device is
    idle, and then neither ends. An exchange of ``lockstep`` depends only on steps of rounds that every rank has already launched.

    Args:
        name: Requested transport. ``auto`` selects ``local`` in one process. In several, it selects ``lockstep`` on GPUs, or if
            d = 2 at every boundary, and ``edge`` otherwise.
        processes: Number of processes of a replica.
        delays: Delay d of each boundary.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: If the named transport does not fit the number of processes.
    """
    if processes == 1:
        require(name in ("auto", "local"), "transport", "auto or local in one process", name)
        return "local"
    require(name != "local", "transport", f"auto, lockstep or edge in {processes} processes", name)
    if name == "auto":
        return "lockstep" if device_type == "cuda" or (delays and set(delays) == {2}) else "edge"
    return name


def simulated_transport(name: TransportName, delays: Sequence[int], device_type: str = "cpu") -> Literal["edge", "lockstep"]:
    """Return the transport that a run with one process for each stage would use, given the delay d of each boundary."""
    several = 2  # any number of processes above 1 gives the same choice
    chosen = choose_transport("auto" if name == "local" else name, several, delays, device_type)
    return "lockstep" if chosen == "lockstep" else "edge"
