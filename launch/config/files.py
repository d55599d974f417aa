"""The configuration of a run as data: in config.yaml in its folder, and in the facts of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from petra.errors import ConfigError, first_line, invalid, require

from .errors import config_error
from .fit import to_config
from .schema import Config
from .targets import is_shipped, parameters

FORMAT = 2
"""Layout of run folders and checkpoints."""
LAST_READERS = {1: "9a1c1d06"}
"""The last commit that reads each older layout. Layout 1 had no number."""
TRUST = "--trust"
"""Flag of commands that read the folder of a run: import code outside of petra that its configuration names."""


def as_data(config: Config) -> dict[str, Any]:
    """Return a configuration as a file contains it."""
    return {"format": FORMAT, **asdict(config)}


def require_format(found: Mapping[Any, Any], source: Path) -> None:
    """Check the layout of a file that contains a configuration.

    Raises:
        ConfigError: If it is another one.
    """
    number = found.get("format", 1)
    reader = f"; commit {LAST_READERS[number]} is the last that reads it" if number in LAST_READERS else ""
    require(number == FORMAT, str(source), f"a run of format {FORMAT}", f"one of format {number}{reader}")


def read_config(path: Path, overrides: DictConfig, *, trusted: bool) -> Config:
    """Return the configuration of a run with overrides.

    Args:
        path: A config.yaml.
        overrides: Keys to change.
        trusted: Whether the file may name code outside of petra.

    Raises:
        ConfigError: If the file is damaged or of another format, names code that is not trusted, or an override doesn't fit it.
    """
    try:
        loaded = OmegaConf.load(path)
        found: Any = OmegaConf.to_container(loaded)
    except Exception as error:  # a damaged file can raise many exceptions
        raise invalid(str(path), "a configuration in YAML", first_line(error)) from error
    require(isinstance(found, dict), str(path), "the configuration of a run", "another file")
    require_format(found, path)
    for key, target in _targets({name: value for name, value in found.items() if name != "format"}):
        if is_shipped(target):
            parameters(target)  # raises an error if petra has no such function
        elif not trusted:
            raise ConfigError(f"{key}: expected a function of petra, got {target}; {TRUST} imports it")
    try:
        composed = OmegaConf.merge({name: value for name, value in found.items() if name != "format"}, overrides)
    except OmegaConfBaseException as error:
        raise config_error(error, Config) from error
    assert isinstance(composed, DictConfig)
    return to_config(composed)


def _targets(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each ``_target_`` with its key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            inside = f"{key}.{name}" if key else str(name)
            if name == "_target_":
                yield inside, str(inner)
            else:
                yield from _targets(inner, inside)
    elif isinstance(value, list):
        for inner in value:
            yield from _targets(inner, key)
