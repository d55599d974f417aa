"""The file that describes the machines of a pipeline (``cluster.machines``), in YAML or JSON.

Example: three devices, of which the last is half as fast, and the same link between all of them::

    devices:
      - {count: 2, memory: 80}
      - {speed: 0.5, memory: 40}
    links:
      - {count: 2, forward: {bandwidth: 12, latency: 20}, backward: {bandwidth: 10, latency: 25}}
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml

from petra.cost_model.machines import Connection, Device, Link, Machines
from petra.errors import ConfigError, alternatives, first_line, invalid, require

from .keys import fields_of

KEY = "cluster.machines"
SCALE = ">= 1e-12 and <= 1e12"
"""Bounds of speeds and bandwidths in the units of the file. Beyond them, times overflow or become 0."""
LATENCY = ">= 0 and <= 1e12"
Entry = TypeVar("Entry")


@dataclass
class DeviceEntry:
    """``count`` equal devices: speed relative to the device of the first process, which measures the blocks, and memory in GB."""

    count: Annotated[int, ">= 1"] = 1
    speed: Annotated[float, SCALE] = 1.0
    memory: Annotated[float | None, "> 0"] = None


@dataclass
class LinkEntry:
    """One direction of a connection: bandwidth in GB/s and latency in microseconds."""

    bandwidth: Annotated[float, SCALE]
    latency: Annotated[float, LATENCY] = 0.0


@dataclass
class ConnectionEntry:
    """``count`` equal connections, each from a process to the next one and back."""

    forward: dict[str, float]
    backward: dict[str, float]
    count: Annotated[int, ">= 1"] = 1


@dataclass
class MachinesFile:
    """Devices and connections in the order of the processes of a pipeline."""

    devices: list[dict[str, Any]]
    links: list[dict[str, Any]] | None = None


def read_machines(path: str) -> Machines:
    """Read the devices and connections of a pipeline.

    Raises:
        ConfigError: If the file can't be read, has unknown keys or values that are not accepted.
    """
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise invalid(KEY, "a YAML or JSON file of devices and links", f"{path} ({first_line(error)})") from error
    try:
        file = _entry(MachinesFile, found)
        devices = [_entry(DeviceEntry, entry) for entry in file.devices]
        links = [_entry(ConnectionEntry, entry) for entry in file.links or ()]
        require(bool(devices), "devices", "one device or more", "none")
        return Machines(
            tuple(Device(e.speed, float("inf") if e.memory is None else 1e9 * e.memory) for e in devices for _ in range(e.count)),
            tuple(Connection(_link(e.forward), _link(e.backward)) for e in links for _ in range(e.count)),
        )
    except ConfigError as error:
        raise ConfigError(f"{KEY}: {path}: {error}") from error


def write_machines(path: str, machines: Machines) -> None:
    """Write a file for :func:`read_machines`."""
    devices = [asdict(DeviceEntry(1, device.speed, device.memory / 1e9)) for device in machines.devices]
    links = [
        {side: {"bandwidth": link.bandwidth / 1e9, "latency": 1e6 * link.latency} for side, link in vars(pair).items()}
        for pair in machines.connections
    ]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(yaml.safe_dump({"devices": devices, "links": links}), encoding="utf-8")


def _entry(kind: type[Entry], found: Any) -> Entry:
    """Return an entry of the file with the values of a mapping."""
    known = fields_of(kind)
    require(isinstance(found, dict), "file", f"a mapping of {alternatives(known)}", found)
    for name in found.keys() - known.keys():
        raise invalid(str(name), f"no such key, but {alternatives(known)}", found[name])
    return kind(**{name: key.read(name, found.get(name, key.default)) for name, key in known.items()})


def _link(found: dict[str, float]) -> Link:
    entry = _entry(LinkEntry, found)
    return Link(1e9 * entry.bandwidth, 1e-6 * entry.latency)
