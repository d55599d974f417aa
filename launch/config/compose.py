"""Compose configurations with Hydra, from the command line or a list of overrides, and check each key.

Keys depend on the ``_target_`` of a group. Errors name the nearest key or file.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from petra.errors import ConfigError, PetraError, accepts, alternatives, first_line, invalid, require
from petra.method import METHODS
from petra.update_rules import UpdateRules

from .keys import Key, definition, is_shipped
from .schema import GROUPS, METHOD, RENAMED, SECTIONS, Config, keys

CONF = str(Path(__file__).parents[2] / "conf")
"""Folder of the configuration files."""


def register() -> None:
    """Register with Hydra the defaults, the first entry of the list in conf/config.yaml, and the configurations without files.

    Sections with a ``_target_`` begin empty: their keys and defaults are known once the target is.
    """
    store = ConfigStore.instance()
    node = OmegaConf.create({name: key.default for name, key in keys().items()})
    for group in GROUPS:
        node[group] = {} if group in SECTIONS else {name: key.default for name, key in keys(group).items()}
        OmegaConf.set_struct(node[group], False)
    store.store("schema", node)
    for name in METHODS:
        store.store(name, configurations("method")[name][1], "method", "method")


def command_line_configs(*, required: bool = False) -> list[Config]:
    """Return the configurations on the command line: one, several with ``--multirun``, none with ``--help`` or ``--cfg``.

    Args:
        required: Refuse an empty command line: the defaults are a run of hours, which nobody starts by accident.

    Raises:
        ConfigError: If there are no arguments, or an override can't be parsed or doesn't fit the schema.
    """
    expected = "arguments such as experiment=demo (about two minutes), or trainer.epochs=300 for the defaults; --help lists all"
    require(not required or len(sys.argv) > 1, "command line", expected, "none")
    # Hydra's parser accepts its options only before or after all overrides.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word.startswith("-") or not ("=" in word or word.startswith("~")))
    register()
    configs: list[DictConfig] = []
    # Without HYDRA_FULL_ERROR, Hydra prints its errors itself, in several lines.
    with patch.dict(os.environ, HYDRA_FULL_ERROR="1"), hydra_errors(sys.argv[1:]):
        hydra.main(version_base="1.3", config_path=CONF, config_name="config")(configs.append)()
        return [to_config(config, keys_of(sys.argv[1:])) for config in configs]


def keys_of(overrides: Sequence[str]) -> set[str]:
    """Return the keys that overrides set."""
    return {override.lstrip("+~").partition("=")[0] for override in overrides}


def compose_overrides(overrides: Sequence[str]) -> Config:
    """Return the configuration that the overrides describe.

    Raises:
        ConfigError: If an override can't be parsed or doesn't fit the schema.
    """
    register()
    with hydra_errors(overrides), hydra.initialize_config_dir(CONF, version_base="1.3"):
        return to_config(hydra.compose("config", list(overrides)), keys_of(overrides))


@contextmanager
def hydra_errors(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Convert errors of Hydra in the body, which have many classes, to :class:`petra.errors.ConfigError`."""
    try:
        yield
    except PetraError:
        raise
    except Exception as error:
        raise config_error(error, overrides) from error


def config_error(error: Exception, overrides: Sequence[str]) -> PetraError:
    """Return a one-line error for an error of Hydra or OmegaConf, which may name no key."""
    if isinstance(error, OverrideParseException):
        return _unparsed(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, name = error.missing_cfg_file.partition("/")  # the files of a group may be in subfolders
        own = [f"one of your own ({group}._target_=module.function)"] if group in SECTIONS else []
        return invalid(group, alternatives([*near_first(name, list(configurations(group))), *own]), name)
    for found in (error, error.__cause__, error.__context__):
        if isinstance(found, ConfigKeyError | ConfigAttributeError) and found.full_key:
            return unknown(str(found.full_key))
    line = first_line(error)
    if line.startswith("Ambiguous value for argument"):
        line = "several values; add --multirun to train with each, or quote a value that contains commas: \"KEY='VALUE'\""
    named = [override for override in overrides if override in line or f"'{override.partition('=')[0]}'" in line]
    key = " ".join(named) or getattr(error, "full_key", None) or " ".join(overrides) or "configuration"
    return ConfigError(f"{key}: {line}")


def _unparsed(error: OverrideParseException) -> PetraError:
    """Return the error for an override that Hydra can't parse, with a quoted value if that is what is missing."""
    key, equals, value = error.override.partition("=")
    if equals and re.fullmatch(r"[+~]*[\w./@]+", key) and value and not set(value) & set("[]{}'\"$"):
        return invalid(key, f"a value in Hydra's syntax; quote it twice in the shell: \"{key}='{value}'\"", value)
    reason = next(line for line in str(error).splitlines() if not line.startswith("Error parsing"))
    return invalid("command line", "an override in Hydra's syntax", " ".join(f"{error.override} ({reason})".split()))


@cache
def configurations(group: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the configurations of a group by name: the line that describes each, and its content, as a file contains it."""
    found = dict[str, tuple[str, dict[str, Any]]]()
    for name, method in METHODS.items() if group == "method" else ():
        node = {key: str(value) if isinstance(value, str) else value for key, value in asdict(method).items()}
        own = {key: value for key, value in node.items() if key in ("delay", "keep") or value not in (False, None, name, "current")}
        found[name] = ", ".join(f"{key} {str(value).lower()}" for key, value in own.items()), {"_target_": METHOD, **node}
    for path in Path(CONF, group).rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        about = next((line[2:] for line in text.splitlines() if line.startswith("# ") and "@package" not in line), "")
        found[str(path.relative_to(Path(CONF, group)).with_suffix(""))] = about, yaml.safe_load(text) or {}
    return dict(sorted(found.items()))


@cache
def targets(group: str) -> tuple[str, ...]:
    """Return the names of the functions and classes in petra that the configurations of a group name as ``_target_``."""
    return tuple(dict.fromkeys(node["_target_"] for _, node in configurations(group).values() if "_target_" in node))


def to_config(composed: DictConfig, given: Collection[str] | None = None) -> Config:
    """Convert a composed configuration to an object of the schema with all defaults, and check the value of each key.

    A key that is null has its default if it can't be null. A key of an experiment is left out if the command line names another
    target, which lacks it or is one of your own.

    Args:
        composed: The configuration.
        given: Keys on the command line; None if all keys of the configuration must fit.

    Raises:
        ConfigError: If a key is unknown, has no value, or a value that is not accepted.
    """
    plain: Any = OmegaConf.to_container(composed, resolve=True)
    for name in plain:
        if name not in (*keys(), *GROUPS):
            raise unknown(name)
    top = {name: key.read(name, plain.get(name, key.default)) for name, key in keys().items()}
    return Config(**top, **{group: _group(group, plain.get(group, {}), given) for group in GROUPS})


def _group(group: str, values: Any, given: Collection[str] | None) -> Any:
    """Return an object of the schema with the values of a group."""
    kind, files = GROUPS[group], f"a file ({group}=FILE) or " if group in SECTIONS else ""
    require(isinstance(values, dict), group, f"{files}its keys ({group}.KEY=VALUE)", values)
    target = values.get("_target_", kind._target_) if group in SECTIONS else ""
    known = keys(group, _existing(group, target) if target else "")
    found, own = dict[str, Any](), bool(target) and not is_shipped(target)
    replaced = given is not None and f"{group}._target_" in given and group not in given  # files have keys for another target
    for name, value in values.items():
        key = f"{group}.{name}"
        shared = any(name in keys(group, other) for other in targets(group))
        if name in known or (own and not (shared and replaced and key not in (given or ()))):
            default = value is None and group in SECTIONS and name in known and not accepts(known[name].hint, None)
            found |= {} if default else {name: value}
        elif not shared:
            raise unknown(key, known)
        elif value is not None and (given is None or key in given):
            raise no_parameter(key, value, target, [name for name in known if name not in keys(group)])
        elif value is not None:
            reason = f"because it is for another {group}._target_ than {target}"
            print(f"{key}={value} of the experiment is left out, {reason}", flush=True)
    found |= {name: key.read(f"{group}.{name}", found.get(name, key.default)) for name, key in known.items()}
    held = {name: found.pop(name) for name in [*found] if name not in kind.__dataclass_fields__}
    if group == "optim":
        found["rules"] = UpdateRules(**{name: held.pop(name) for name in UpdateRules.__dataclass_fields__})
    return kind(**found, **({"options": held} if group in SECTIONS else {}))


def _existing(group: str, target: Any) -> str:
    """Return a target, which petra must have if it is shipped, and which must be the name of a function in a module otherwise.

    Raises:
        ConfigError: If it is not.
    """
    with suppress(ConfigError):
        if isinstance(target, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", target):
            if is_shipped(target):
                definition(target)
            return target
    names = {known.rpartition(".")[2]: known for known in targets(group)}
    near = [names[name] for name in near_first(str(target).rpartition(".")[2], list(names))]
    raise invalid(f"{group}._target_", alternatives([*near, "module.function of your own"]), target)


def no_parameter(key: str, value: object, target: str, parameters: Collection[str]) -> PetraError:
    """Return the error for a key that is no parameter of a target."""
    short = target.rpartition(".")[2] if is_shipped(target) else target
    return invalid(key, f"null for {short}, which has the options {', '.join(parameters) or 'none'}", value)


def unknown(key: str, siblings: Collection[str] | None = None) -> PetraError:
    """Return the error for a key that doesn't exist, with the nearest one: in its group, or by its name in any group."""
    if key in RENAMED:
        return ConfigError(f"{key}: no such key; use {RENAMED[key]}")
    group, _, name = key.rpartition(".")
    siblings = [*keys(), *GROUPS] if siblings is None else siblings
    anywhere = {full.rpartition(".")[2]: full for full in reversed(list(all_keys()))}
    for names in ({known: f"{group}.{known}".lstrip(".") for known in siblings}, anywhere):
        if near := get_close_matches(name, names, 1, 0.7):
            return ConfigError(f"{key}: no such key; did you mean {names[near[0]]}?")
    return ConfigError(f"{key}: no such key; expected {alternatives(siblings)}")


def near_first(name: str, known: Sequence[str]) -> list[str]:
    """Return the known names with the one nearest to ``name`` first."""
    near = get_close_matches(name, known, 1, 0.6)
    return [*near, *(other for other in known if other not in near)]


@cache
def all_keys() -> dict[str, Key]:
    """Return the keys of all configurations by their full names: of the schema, and of all targets of petra."""
    found = dict(keys())
    for group in GROUPS:
        for target in targets(group) or ("",):
            found = {**{f"{group}.{name}": key for name, key in keys(group, target).items()}, **found}
    return found
