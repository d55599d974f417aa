"""Settings of a config section that go to the builder which the section names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from inspect import signature
from typing import Any

from petra.errors import ConfigError


def options(section: Any, key: str, builder: Callable[..., Any], general: Collection[str] = ()) -> dict[str, Any]:
    """The settings of ``section`` that aren't null, for ``builder``.

    Args:
        section: a dataclass of the schema with the field ``name``.
        key: the section's name.
        general: fields that are not the builder's; the others may be null.

    Raises:
        ConfigError: a setting is given that the builder doesn't have.
    """
    fields = {name: value for name, value in vars(section).items() if name not in general and name != "name"}
    accepted = [name for name in fields if name in signature(builder).parameters]
    for name, value in fields.items():
        if value is not None and name not in accepted:
            names = ", ".join(accepted) or "none"
            raise ConfigError(f"{key}.{name}: {section.name} has no such setting, accepted are {names}")
    return {name: fields[name] for name in accepted if fields[name] is not None}
