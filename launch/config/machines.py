"""The file that describes the machines of a pipeline (``cluster.machines``), in YAML or JSON.

Example: three devices, of which the last is half as fast, and the same link between all of them::

    devices:
      - {count: 2, memory: 80}
      - {speed: 0.5, memory: 40}
    links:
      - {count: 2, forward: {bandwidth: 12, latency: 20}, backward: {bandwidth: 10, latency: 25}}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from petra.cost_model.links import Connection, Link
from petra.cost_model.machines import Device, Machines
from petra.errors import ConfigError, first_line, invalid, require

KEY = "cluster.machines"
SMALLEST, LARGEST = 1e-12, 1e12
"""Range of speeds, bandwidths and latencies above 0, in the units of the file. Beyond it, times overflow or become 0."""


@dataclass
class DeviceEntry:
    """``count`` equal devices.

    Attributes:
        speed: Speed relative to the device of the first process, which measures the blocks.
        memory: Memory in GB; null for no limit.
    """

    count: int = 1
    speed: float = 1.0
    memory: float | None = None


@dataclass
class LinkEntry:
    """One direction of a connection.

    Attributes:
        bandwidth: GB/s.
        latency: Microseconds.
    """

    bandwidth: float = MISSING
    latency: float = 0.0


@dataclass
class ConnectionEntry:
    """``count`` equal connections, each from a process to the next one and back."""

    forward: LinkEntry = field(default_factory=LinkEntry)
    backward: LinkEntry = field(default_factory=LinkEntry)
    count: int = 1


@dataclass
class MachinesFile:
    """Devices and connections in the order of the processes of a pipeline."""

    devices: list[DeviceEntry] = field(default_factory=list)
    links: list[ConnectionEntry] = field(default_factory=list)


def read_machines(path: str) -> Machines:
    """Read the devices and connections of a pipeline.

    Raises:
        ConfigError: If the file can't be read, has unknown keys or values that are not accepted.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(MachinesFile), OmegaConf.load(path))
        found = OmegaConf.to_object(merged)
    except (OSError, YAMLError, OmegaConfBaseException, ValueError) as error:
        raise invalid(KEY, "a YAML or JSON file of devices and links", f"{path} ({first_line(error)})") from error
    assert isinstance(found, MachinesFile)
    try:
        for name, values in _values(found):
            require(all(value > 0 for value in values), name, "numbers > 0", list(values))
            bounded = name == "memory" or all(in_range(value) for value in values)  # memory may be unlimited
            require(bounded, name, f"numbers from {SMALLEST:g} to {LARGEST:g}", list(values))
        latencies = [entry.latency for entry in _links(found)]
        bounded = all(value == 0 or in_range(value) for value in latencies)
        require(bounded, "latency", f"0, or numbers from {SMALLEST:g} to {LARGEST:g}", latencies)
        devices = [
            Device(entry.speed, float("inf") if entry.memory is None else 1e9 * entry.memory)
            for entry in found.devices
            for _ in range(entry.count)
        ]
        require(bool(devices), "devices", "one device or more", "none")
        connections = [Connection(_link(entry.forward), _link(entry.backward)) for entry in found.links for _ in range(entry.count)]
        return Machines(tuple(devices), tuple(connections))
    except ConfigError as error:
        raise ConfigError(f"{KEY}: {path}: {error}") from error


def in_range(value: float) -> bool:
    """Return whether a speed, bandwidth or latency can be used for predictions."""
    return SMALLEST <= value <= LARGEST


def write_machines(path: str, machines: Machines) -> None:
    """Write a file for :func:`read_machines`."""
    file = MachinesFile(
        [DeviceEntry(1, device.speed, device.memory / 1e9) for device in machines.devices],
        [ConnectionEntry(_entry(pair.forward), _entry(pair.backward)) for pair in machines.connections],
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(file), path)


def _links(found: MachinesFile) -> list[LinkEntry]:
    return [side for entry in found.links for side in (entry.forward, entry.backward)]


def _values(found: MachinesFile) -> list[tuple[str, list[float]]]:
    return [
        ("count", [*(entry.count for entry in found.devices), *(entry.count for entry in found.links)]),
        ("speed", [entry.speed for entry in found.devices]),
        ("memory", [entry.memory for entry in found.devices if entry.memory is not None]),
        ("bandwidth", [entry.bandwidth for entry in _links(found)]),
    ]


def _link(entry: LinkEntry) -> Link:
    return Link(1e9 * entry.bandwidth, 1e-6 * entry.latency)


def _entry(link: Link) -> LinkEntry:
    return LinkEntry(link.bandwidth / 1e9, 1e6 * link.latency)
