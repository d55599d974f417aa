"""The file that describes the machines of a pipeline (``cluster.machines``), in YAML or JSON.

Example: three devices, of which the last is half as fast, and the same link between all of them::

    devices:
      - {count: 2, memory: 80}
      - {speed: 0.5, memory: 40}
    links:
      - {count: 2, forward: {bandwidth: 12, latency: 20}, backward: {bandwidth: 10, latency: 25}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf

from petra.cost_model.machines import Connection, Device, Link, Machines
from petra.errors import ConfigError, alternatives, invalid, require

from .keys import Key

KEY = "cluster.machines"
SCALE = ">= 1e-6 and <= 1e6"
"""Bounds of speeds, bandwidths, memory and counts in the units of the file. Beyond them, a value is in another unit."""
LATENCY = ">= 0 and <= 1e9"
COUNT, MEMORY = Key(Annotated[int, ">= 1 and <= 1e6"], 1), Key(Annotated[float | None, "> 0 and <= 1e6"], None)
"""Number of equal devices or connections, and memory of a device in GB."""
FILE = {"devices": Key(list[dict[str, Any]], ...), "links": Key(list[dict[str, Any]] | None, None)}
"""Devices in the order of the processes of a pipeline, and connections, each from a process to the next one and back."""
DEVICE = {"count": COUNT, "speed": Key(Annotated[float, SCALE], 1.0), "memory": MEMORY}
"""Speeds are relative to the device of the first process, which measures the blocks."""
CONNECTION = {"count": COUNT, "forward": Key(dict[str, Any], ...), "backward": Key(dict[str, Any], ...)}
LINK = {"bandwidth": Key(Annotated[float, SCALE], ...), "latency": Key(Annotated[float, LATENCY], 0.0)}
"""Bandwidth in GB/s, and latency in microseconds."""


def read_machines(path: str | Path, key: str = KEY) -> Machines:
    """Read the devices and connections of a pipeline. Speeds are divided by the first device's.

    Raises:
        ConfigError: If the file can't be read, has unknown keys or values that are not accepted.
    """
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))  # refuses a key that occurs twice
    except Exception as error:  # a damaged file can raise many exceptions
        raise invalid(key, "a YAML or JSON file of devices and links", f"{path} ({' '.join(str(error).split())})") from error
    try:
        file = _entry(FILE, found)
        devices = [_entry(DEVICE, entry) for entry in file["devices"]]
        links = [_entry(CONNECTION, entry) for entry in file["links"] or ()]
        require(bool(devices), "devices", "one device or more", "none")
        own = devices[0]["speed"]
        return Machines(
            tuple(Device(e["speed"] / own, 1e9 * (e["memory"] or float("inf"))) for e in devices for _ in range(e["count"])),
            tuple(Connection(_link(e["forward"]), _link(e["backward"])) for e in links for _ in range(e["count"])),
        )
    except ConfigError as error:
        raise ConfigError(f"{key}: {path}: {error}") from error


def require_writable(path: str) -> None:
    """Check that :func:`write_machines` can write a file, whose folder is made, before what it contains is measured.

    Raises:
        PetraError: If it can't.
    """
    from petra.training.records import PART, writing

    file = Path(path)
    require(not file.is_dir(), KEY, "a file to write", f"the folder {path}")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(file.name + PART)
        draft.touch()
        draft.unlink()


def write_machines(path: str, machines: Machines) -> None:
    """Write a file for :func:`read_machines`.

    Raises:
        DataError: If it can't be written.
    """
    from petra.training.records import write_text_atomically

    devices = [{"speed": device.speed, "memory": device.memory / 1e9} for device in machines.devices]
    links = [
        {side: {"bandwidth": link.bandwidth / 1e9, "latency": 1e6 * link.latency} for side, link in vars(pair).items()}
        for pair in machines.connections
    ]
    write_text_atomically(Path(path), OmegaConf.to_yaml(OmegaConf.create({"devices": devices, "links": links})))


def _entry(known: Mapping[str, Key], found: Any) -> dict[str, Any]:
    """Return the values of a mapping in the file, with defaults."""
    require(isinstance(found, dict), "file", f"a mapping of {alternatives(known)}", found)
    for name in found.keys() - known.keys():
        raise invalid(str(name), f"no such key, but {alternatives(known)}", found[name])
    return {name: key.read(name, found.get(name, key.default)) for name, key in known.items()}


def _link(found: dict[str, float]) -> Link:
    entry = _entry(LINK, found)
    require(not 0 < entry["latency"] < 1e-3, "latency", "microseconds: 0 or a number >= 0.001", entry["latency"])
    return Link(1e9 * entry["bandwidth"], 1e-6 * entry["latency"])
