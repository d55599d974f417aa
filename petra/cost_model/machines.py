"""Machines of a pipeline that differ in speed, memory and links."""

from __future__ import annotations

from dataclasses import dataclass

from petra.cost_model.links import INSTANT, Connection, Link, connections
from petra.errors import require


@dataclass(frozen=True)
class Device:
    """The device of one process.

    Attributes:
        speed: Speed relative to the device on which costs were measured.
        memory: Bytes available to its stages.

    Raises:
        ConfigError: If a value is not above 0.
    """

    speed: float = 1.0
    memory: float = float("inf")

    def __post_init__(self) -> None:
        require(self.speed > 0, "speed", "a number > 0", self.speed)
        require(self.memory > 0, "memory", "a number > 0", self.memory)


@dataclass(frozen=True)
class Machines:
    """The devices of a pipeline's processes, in order, and the connections between neighbours.

    Attributes:
        devices: Device of each process.
        connections: Connection of each process to the next one.
    """

    devices: tuple[Device, ...]
    connections: tuple[Connection, ...]

    def __post_init__(self) -> None:
        connections(self.connections, len(self.devices))

    @staticmethod
    def equal(processes: int, link: Link = INSTANT, memory: float = float("inf")) -> Machines:
        """Return machines of equal speed and memory, connected by the same link everywhere."""
        return Machines((Device(memory=memory),) * processes, connections(link, processes))
