"""Options in a section of the configuration, passed to the function or class that the section's name selects."""

from __future__ import annotations

from collections.abc import Callable, Collection
from inspect import signature
from typing import Any

from petra.errors import invalid


def options(section: Any, key: str, builder: Callable[..., Any], general: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of a section that are not null, as keyword arguments for ``builder``.

    Args:
        section: A dataclass of the schema with a field ``name``.
        key: Key of the section.
        builder: What the section's name selects.
        general: Fields that are not for the builder.

    Raises:
        ConfigError: If an option is set that the builder doesn't have.
    """
    fields = {name: value for name, value in vars(section).items() if name not in general and name != "name"}
    accepted = [name for name in fields if name in signature(builder).parameters]
    for name, value in fields.items():
        if value is not None and name not in accepted:
            known = ", ".join(accepted) or "none"
            raise invalid(f"{key}.{name}", f"null for {section.name}, which has the options {known}", value)
    return {name: fields[name] for name in accepted if fields[name] is not None}
