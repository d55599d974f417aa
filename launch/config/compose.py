"""Compose configurations with Hydra, from the command line or a list of overrides, and check each key.

Keys depend on the ``_target_`` of a group. Errors name the nearest key or file.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import Any, NamedTuple
from unittest.mock import patch

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from petra.errors import ConfigError, PetraError, accepts, alternatives, first_line, invalid, require
from petra.method import METHODS
from petra.update_rules import UpdateRules

from .catalogue import CONF, all_keys, configurations, targets
from .keys import definition, is_shipped
from .schema import GROUPS, RENAMED, SECTIONS, Config, keys
from .words import SWEPT, as_typed, check_hydra, check_words, keys_of, unparsed


class Job(NamedTuple):
    """A configuration on the command line.

    Attributes:
        config: The configuration.
        swept: The overrides in which it differs from others of a sweep; none without a sweep.
    """

    config: Config
    swept: tuple[str, ...]


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


def command_line_jobs(*, required: bool = False) -> list[Job]:
    """Return the configurations on the command line: one, several with ``--multirun``, none with ``--help`` or ``--cfg``.

    Args:
        required: Refuse an empty command line: the defaults are a run of hours, which nobody starts by accident.

    Raises:
        ConfigError: If there are no arguments, an override can't be parsed or doesn't fit the schema, or two runs share a folder.
    """
    expected = "arguments such as experiment=demo (about two minutes), or trainer.epochs=300 for the defaults; --help lists all"
    require(not required or len(sys.argv) > 1, "command line", expected, "none")
    # Hydra's parser accepts its options only before or after all overrides.
    words = sorted(sys.argv[1:], key=lambda word: word.startswith("-") or not ("=" in word or word.startswith("~")))
    check_words(words)
    sys.argv[1:] = words = as_typed(words)
    register()
    composed = list[tuple[Any, list[str]]]()

    def add(config: DictConfig) -> None:
        try:  # of Hydra's keys and resolvers, which end with this function
            check_hydra()
            plain: Any = OmegaConf.to_container(config, resolve=True)
        except Exception as error:  # Hydra would print the overrides, too
            plain = error
        words: Any = OmegaConf.to_container(HydraConfig.get().overrides.task)  # unresolved
        composed.append((plain, words))

    # Without HYDRA_FULL_ERROR, Hydra prints its errors itself, in several lines.
    with patch.dict(os.environ, HYDRA_FULL_ERROR="1"), hydra_errors(words):
        hydra.main(version_base="1.3", config_path=CONF, config_name="config")(add)()
        for plain, _ in composed:
            if isinstance(plain, Exception):
                raise plain
        shared = set.intersection(*(set(own) for _, own in composed)) if len(composed) > 1 else None
        jobs = [
            Job(to_config(plain, keys_of(words)), () if shared is None else tuple(word for word in own if word not in shared))
            for plain, own in composed
        ]
    folders = [job.config.run_dir for job in jobs if job.config.run_dir is not None]
    for folder in folders:
        once = folders.count(folder) == 1
        require(once, "run_dir", f"another folder for each run of a sweep, {SWEPT}", folder)
    return jobs


def command_line_configs() -> list[Config]:
    """Return the configurations of :func:`command_line_jobs`."""
    return [job.config for job in command_line_jobs()]


def compose_overrides(overrides: Sequence[str]) -> Config:
    """Return the configuration that the overrides describe.

    Raises:
        ConfigError: If an override can't be parsed or doesn't fit the schema.
    """
    check_words(overrides)
    words = as_typed(overrides)
    register()
    with hydra_errors(words), hydra.initialize_config_dir(CONF, version_base="1.3"):
        return to_config(hydra.compose("config", words), keys_of(words))


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
        return _unparsed(error.override, error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, name = error.missing_cfg_file.partition("/")  # the files of a group may be in subfolders
        own = [f"one of your own ({group}._target_=module.function)"] if group in SECTIONS else []
        known = list(configurations(group))
        if near := get_close_matches(name, known, 1, 0.6):
            return invalid(
                group, alternatives([near[0], f"another name ({', '.join(known[:3])}, ...; --help lists all)", *own]), name
            )
        return invalid(group, alternatives([*known, *own]), name)
    for found in (error, error.__cause__, error.__context__):
        if isinstance(found, ConfigKeyError | ConfigAttributeError) and found.full_key:
            return unknown(str(found.full_key))
    line = first_line(error)
    if line.startswith("Ambiguous value for argument"):
        line = "several values; add --multirun to train with each, or quote a value that contains commas: \"KEY='VALUE'\""
    named = [override for override in overrides if override in line or f"'{override.partition('=')[0]}'" in line]
    key = " ".join(named) or getattr(error, "full_key", None) or " ".join(overrides) or "configuration"
    return ConfigError(f"{key}: {line}")


def _unparsed(word: str, error: Exception) -> PetraError:
    """Return the error for an override that Hydra can't parse: the group of a name alone, or :func:`unparsed`."""
    groups = [*SECTIONS, "experiment"] if re.fullmatch(r"[\w/]+", word) else []
    for group in groups:
        if word in configurations(group):
            return invalid("command line", f"{group}={word}", word)
    return unparsed(word, error)


def to_config(composed: DictConfig | dict[str, Any], given: Collection[str] | None = None) -> Config:
    """Convert a composed configuration to an object of the schema with all defaults, and check the value of each key.

    A key that is null has its default if it can't be null. A key of an experiment is left out if the command line names another
    target, which lacks it or is one of your own.

    Args:
        composed: The configuration.
        given: Keys on the command line; None if all keys of the configuration must fit.

    Raises:
        ConfigError: If a key is unknown, has no value, or a value that is not accepted.
    """
    plain: Any = composed if isinstance(composed, dict) else OmegaConf.to_container(composed, resolve=True)
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
    short, (group, _, name) = target.rpartition(".")[2] if is_shipped(target) else target, key.partition(".")
    if key not in all_keys() and (near := get_close_matches(name, parameters, 1, 0.7)):
        return ConfigError(f"{key}: no such key; did you mean {group}.{near[0]}?")
    return invalid(key, f"null for {short}, which has the options {', '.join(parameters) or 'none'}", value)


def unknown(key: str, siblings: Collection[str] | None = None) -> PetraError:
    """Return the error for a key that doesn't exist, with the nearest one: in its group, or by its name in any group."""
    if key == "experiment":
        return ConfigError('experiment: no such key; a file of your own must begin with "# @package _global_"')
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
