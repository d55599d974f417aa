"""The configuration of a run as data: in config.yaml in its folder, and in the facts of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from petra.errors import ConfigError, first_line, invalid, require

from ..config.compose import hydra_errors
from ..config.keys import definition, is_shipped
from ..config.read import to_config
from ..config.schema import SECTIONS, Config

FORMAT = 2
"""Layout of run folders and checkpoints."""
LAST_READERS = {1: "dc4b0152"}
"""The last commit that reads each older layout. Layout 1 had no number."""
TRUST = "--trust"
"""Flag of commands that read the folder of a run: import code outside of petra that its configuration names."""


def as_data(config: Config) -> dict[str, Any]:
    """Return a configuration as a file contains it."""
    found = {"format": FORMAT, **asdict(config)}
    for group in SECTIONS:
        found[group] |= {**found[group].pop("rules"), **found[group].pop("options")}
    return found


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
        found: Any = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # a damaged file can raise many exceptions
        raise invalid(str(path), "a configuration in YAML", first_line(error)) from error
    require(isinstance(found, dict), str(path), "the configuration of a run", "another file")
    require_format(found, path)
    del found["format"]
    for key, target in _targets(found):
        if is_shipped(target):
            definition(target)  # raises if petra has none
        elif not trusted:
            raise ConfigError(f"{key}: expected a function of petra, got {target}; {TRUST} imports it")
    with hydra_errors():
        composed = OmegaConf.merge(found, overrides)
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
