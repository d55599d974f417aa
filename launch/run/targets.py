"""Functions and classes that a configuration names as ``_target_``: petra's, or the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch
from hydra.utils import instantiate
from torch import nn

import petra.inplace_abn  # noqa: F401  adds its data sets to those of petra.data
from petra.engine.options.optimizer_state import NUMBERS, entries, parts_of
from petra.errors import ConfigError, accepts, first_line, invalid, require
from petra.torch_private import eager

from ..config.compose import no_parameter
from ..config.keys import Key, is_shipped
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
        if not is_shipped(section._target_) and (hint := annotation(function, name)) is not None:
            key = Key(hint, None)
            text = key.is_text and not accepts(hint, value) and isinstance(value, int | float)
            require(not text, f"{group}.{name}", f"a text; quote it twice in the shell: \"{group}.{name}='TEXT'\"", value)
    made: Callable[..., Any] = instantiate({"_target_": section._target_, **section.options, "_partial_": True, "_convert_": "all"})
    return made


def optimizer_factory(section: Section) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return the function that builds the optimizer of a stage from its module.

    A target whose first parameter is called ``params``, such as an optimizer class, is called with the module's trained parameters,
    any other with the module. A class of another package than torch is tried first: two steps of a small layer.

    Raises:
        ConfigError: As for :func:`factory`, or if the trial fails, changes no weights, or leaves state that can't be saved.
    """
    function: Callable[..., torch.optim.Optimizer] = factory("optim", section)
    if next(iter(signature(function).parameters), "") != "params":
        return function

    def made(module: nn.Module) -> torch.optim.Optimizer:
        return function([p for p in module.parameters() if p.requires_grad])

    if not section._target_.startswith("torch.optim."):
        _try_optimizer(made, section._target_)
    return made


def _try_optimizer(function: Callable[[nn.Module], torch.optim.Optimizer], target: str) -> None:
    module = nn.Linear(64, 64)  # torchao quantizes states of at least 4096 elements
    weights = module.weight.detach().clone()
    try:
        optimizer: Any = function(module)
        if not hasattr(optimizer, "state"):  # refused by the pipeline
            return
        before = {name: repr(value) for name, value in entries(optimizer).items()}
        if hasattr(optimizer, "train"):
            optimizer.train()
        with eager():
            for _ in range(2):
                for p in module.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
    except Exception as error:
        expected = "an optimizer of any parameters, whose step needs no arguments"
        raise invalid("optim._target_", expected, f"{target} ({type(error).__name__}: {first_line(error)})") from error
    require(not weights.equal(module.weight), "optim._target_", "an optimizer whose step changes weights", target)
    states = {kind: value for p in module.parameters() for kind, value in optimizer.state.pop(p, {}).items()}
    unsaved = [kind for kind, value in states.items() if value is not None and not parts_of(kind, value)] + [*optimizer.state]
    changed = {name: value for name, value in entries(optimizer).items() if repr(value) != before.get(name)}
    unsaved += [name for name, value in changed.items() if type(value).__name__ not in NUMBERS]
    expected = "an optimizer that keeps tensors by parameter, and numbers, which checkpoints contain"
    require(not unsaved, "optim._target_", expected, f"{target}, which also keeps {', '.join(unsaved)}")


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


def annotation(function: Callable[..., Any], name: str) -> Any:
    """Return the type of a parameter of a function or class, or None if it has none that can be read."""
    try:
        return get_type_hints(function.__init__ if isinstance(function, type) else function).get(name)  # type: ignore[misc]
    except Exception:  # names that only type checkers know
        return None


def imported(key: str, target: str) -> Callable[..., Any]:
    """Return a function or class. Modules that are not petra's are imported from the working directory or the import path.

    Raises:
        ConfigError: If it can't be imported, or can't be called. The message begins with ``key``.
    """
    module, _, name = target.rpartition(".")
    if (folder := str(Path.cwd())) not in sys.path:  # a console script doesn't search the working directory
        sys.path.append(folder)  # not first: its files may have the names of installed packages
    require(bool(module), key, "module.function", target or "nothing")
    try:
        function: Any = getattr(import_module(module), name, None)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {module} can't be imported ({type(error).__name__}: {first_line(error)})") from error
    require(callable(function), key, f"a function of {module}", name)
    result: Callable[..., Any] = function
    return result
