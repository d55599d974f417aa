"""Models and data sets outside the package, which a configuration names as ``module:function``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from petra.data import DATASETS
from petra.errors import ConfigError, first_line, invalid
from petra.models import MODELS

from ..config.names import is_own
from ..config.schema import Config


def register_own(config: Config) -> None:
    """Add the functions that ``model.name`` and ``data.name`` name as ``module:function`` to the models and the data sets.

    Modules are imported from the working directory or from the import path.

    Raises:
        ConfigError: If a module or a function can't be imported.
    """
    if is_own(config.model.name):
        MODELS.setdefault(config.model.name, imported(config.model.name, "model.name"))
    if is_own(config.data.name):
        DATASETS.setdefault(config.data.name, imported(config.data.name, "data.name"))


def require_arguments(name: str, function: Callable[..., Any], key: str, *args: Any, **options: Any) -> None:
    """Check that a function outside the package can be called with these arguments.

    Raises:
        ConfigError: If it can't.
    """
    if is_own(name):
        try:
            signature(function).bind(*args, **options)
        except TypeError as error:
            given = ", ".join([*(["classes"] if args else []), *options]) or "no arguments"
            raise invalid(key, f"a function that can be called with {given}", f"{name} ({first_line(error)})") from error


def imported(name: str, key: str) -> Callable[..., Any]:
    """Return the function ``module:function`` or ``module.function``.

    Args:
        name: Name of the function.
        key: Key of the configuration, for the message.

    Raises:
        ConfigError: If it can't be imported, or can't be called.
    """
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    folder = str(Path.cwd())
    if not module.startswith("petra.") and folder not in sys.path:  # a console script doesn't search the working directory
        sys.path.insert(0, folder)
    try:
        function = getattr(import_module(module), attribute, None)
    except Exception as error:
        raise ConfigError(f"{key}: {module} can't be imported ({type(error).__name__}: {first_line(error)})") from error
    if not callable(function):
        raise invalid(key, f"a function of {module}", attribute)
    result: Callable[..., Any] = function
    return result
