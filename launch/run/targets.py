"""Functions and classes that a configuration names as ``_target_``: petra's, or the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeVar

from hydra.utils import instantiate

import petra.inplace_abn  # noqa: F401  adds its data sets to those of petra.data
from petra.errors import ConfigError, first_line, invalid, require

from ..config.read import no_parameter
from ..config.schema import GIVEN, Section

Built = TypeVar("Built")


def factory(group: str, section: Section) -> Callable[..., Any]:
    """Return the function or class of a section, with the section's keys as keyword arguments.

    Raises:
        ConfigError: If it can't be imported, or has no such parameters. The message begins with the group.
    """
    function = imported(f"{group}._target_", section._target_)
    for name, value in section.options.items():
        if not takes(function, name):
            options = [each for each in signature(function).parameters if not {each, f"{group}.{each}"} & GIVEN]
            raise no_parameter(f"{group}.{name}", value, section._target_, options)
    made: Callable[..., Any] = instantiate({"_target_": section._target_, **section.options, "_partial_": True, "_convert_": "all"})
    return made


def built(kind: type[Built], group: str, section: Section, **given: Any) -> Built:
    """Call the function or class of a section.

    Args:
        kind: Class of the result.
        group: Group of the section, for messages.
        section: The section.
        given: Arguments that depend on the rest of the run; those that it has no parameters for are left out.

    Raises:
        ConfigError: If it can't be called with these arguments, or returns something else.
    """
    function = factory(group, section)
    given = {name: value for name, value in given.items() if takes(function, name)}
    try:
        signature(function).bind(**given)
    except TypeError as error:
        expected = f"a function that can be called with {', '.join(given) or 'no arguments'}"
        raise invalid(f"{group}._target_", expected, f"{section._target_} ({first_line(error)})") from error
    made = function(**given)
    if not isinstance(made, kind):
        expected = f"a function that returns a {kind.__module__}.{kind.__name__}"
        raise invalid(f"{group}._target_", expected, f"{section._target_}, which returns {made!r}")
    return made


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter with this name."""
    parameters = signature(function).parameters
    return name in parameters or any(entry.kind is Parameter.VAR_KEYWORD for entry in parameters.values())


def imported(key: str, target: str) -> Callable[..., Any]:
    """Return a function or class. Modules that are not petra's are imported from the working directory or the import path.

    Raises:
        ConfigError: If it can't be imported, or can't be called. The message begins with ``key``.
    """
    module, _, name = target.rpartition(".")
    if (folder := str(Path.cwd())) not in sys.path:  # a console script doesn't search the working directory
        sys.path.insert(0, folder)
    try:
        function: Any = getattr(import_module(module), name, None)
    except Exception as error:
        raise ConfigError(f"{key}: {module} can't be imported ({type(error).__name__}: {first_line(error)})") from error
    require(callable(function), key, f"a function of {module}", name)
    result: Callable[..., Any] = function
    return result
