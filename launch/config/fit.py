"""Fits the schema to what a configuration names as ``_target_``, and checks the configuration."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache, partial
from typing import Annotated, Any, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from petra.errors import ConfigError, PetraError, alternatives, invalid

from .checks import Key, require_valid, schema_keys
from .errors import config_error, near_first, suggestion
from .presets import presets, targets
from .schema import SECTIONS, Config, Section
from .targets import definition, is_shipped, parameters


def register() -> None:
    """Register with Hydra the schema, the first entry of the defaults in conf/config.yaml, and the configurations without files.

    Sections with a ``_target_`` begin empty and accept any key: their keys and defaults are known once the target is.
    """
    store = ConfigStore.instance()
    node = OmegaConf.create({**OmegaConf.structured(Config), **{group: {} for group in SECTIONS}})
    for group in SECTIONS:
        OmegaConf.set_struct(node[group], False)
    OmegaConf.set_struct(node.cluster.env, False)
    store.store("schema", node)
    for group, package in (("model", "model"), ("method", "method"), ("experiment", "_global_")):
        for name, preset in presets(group).items():
            folder, _, leaf = f"{group}/{name}".rpartition("/")
            store.store(leaf, preset, folder, package)
    for group in ("trainer", "checkpoint", "cluster"):
        store.store("default", {}, group, group)


def to_config(composed: DictConfig, given: Collection[str] | None = None) -> Config:
    """Convert a composed configuration to an object of the schema with all defaults, and check the value of each key.

    A key that is null has the default of the target's signature if the parameter can't be None. A key of an experiment that the
    target lacks, because the command line names another target, is left out.

    Args:
        composed: The configuration.
        given: Keys on the command line; None if all keys of the configuration must fit.

    Raises:
        ConfigError: If a key is unknown, has no value, or a value that is not accepted.
    """
    for key in sorted(OmegaConf.missing_keys(composed)):
        known = schema_keys(Config).get(key)
        raise invalid(key, "a value" if known is None else known.expected, "nothing")
    try:
        plain: Any = OmegaConf.to_container(composed, resolve=True)
        schema = _schema(tuple(_fitted(group, plain.get(group), given) for group in SECTIONS))
    except OmegaConfBaseException as error:
        raise config_error(error, Config) from error
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), plain))
    except OmegaConfBaseException as error:
        raise config_error(error, schema) from error
    assert isinstance(config, Config)
    require_valid(config)
    return config


@cache
def section(group: str, target: str, others: tuple[str, ...] = ()) -> type[Section]:
    """Return the schema of a section: with a key for each parameter of its target.

    Args:
        group: The group. Keys that it has for any target keep their types and checks, but the target's defaults apply.
        target: Function or class.
        others: Keys of a target outside of petra.
    """
    base = SECTIONS[group]
    found: list[tuple[str, Any, Any]] = [(name, Any, None) for name in others]
    if is_shipped(target):
        kinds = get_type_hints(base, include_extras=True)
        for name, entry in parameters(target).items():
            if name not in base.GIVEN:
                value: Any = MISSING if entry.default is ... else entry.default
                value = field(default_factory=partial(list, value)) if isinstance(value, list) else field(default=value)
                found.append((name, kinds.get(name, entry.annotation), value))
    return make_dataclass(base.__name__, found, bases=(base,))


def all_keys() -> dict[str, Key]:
    """Return the keys of all configurations by their full names, without groups: of the schema, and of all targets of petra."""
    found = {key: entry for key, entry in schema_keys(Config).items() if not is_dataclass(entry.kind)}
    for group in SECTIONS:
        for target in targets(group):
            found = {**{f"{group}.{name}": entry for name, entry in schema_keys(section(group, target)).items()}, **found}
    return found


def _fitted(group: str, values: Any, given: Collection[str] | None) -> type[Section]:
    """Return the schema of a section for its target, and remove keys from its values that do not apply."""
    base = SECTIONS[group]
    target = values.get("_target_", MISSING) if isinstance(values, dict) else MISSING
    if not isinstance(target, str) or target == MISSING:
        return base
    _require_target(group, target)
    if not is_shipped(target):
        return section(group, target, tuple(name for name in values if name not in {entry.name for entry in fields(base)}))
    fit = section(group, target)
    known = {f"{group}.{name}": key for name, key in schema_keys(fit).items()}
    for key, name in [(f"{group}.{name}", name) for name in values]:
        if values[name] is None and not (key in known and known[key].optional):
            del values[name]
        elif key not in known:
            elsewhere = any(name in parameters(other) for other in targets(group))
            if not elsewhere:
                raise ConfigError(f"{key}: no such key; {suggestion(key, known)}")
            if given is None or key in given:
                raise no_parameter(
                    group, name, values[name], target, [name for name in parameters(target) if name not in base.GIVEN]
                )
            print(f"{key}={values.pop(name)} of the experiment is left out, because {target} has no such parameter", flush=True)
    return fit


def _require_target(group: str, target: str) -> None:
    """Check that a target of petra exists, and that another one is the name of a function in a module.

    Raises:
        ConfigError: If it does not, or is not.
    """
    try:
        known = bool(re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", target)) and (not is_shipped(target) or bool(definition(target)))
    except ConfigError:
        known = False
    if not known:
        names = {known.rpartition(".")[2]: known for known in targets(group)}
        near = [names[name] for name in near_first(target.rpartition(".")[2], list(names))]
        raise invalid(f"{group}._target_", alternatives([*near, "module.function of your own"]), target)


def no_parameter(group: str, name: str, value: object, target: str, parameters: Collection[str]) -> PetraError:
    """Return the error for a key that is no parameter of a target."""
    known = ", ".join(parameters) or "none"
    short = target.rpartition(".")[2] if is_shipped(target) else target
    return invalid(f"{group}.{name}", f"null for {short}, which has the options {known}", value)


@cache
def _schema(sections: tuple[type[Section], ...]) -> type[Config]:
    kinds = get_type_hints(Config, include_extras=True)
    pairs = zip(SECTIONS, sections, strict=True)
    return make_dataclass(
        "Config", [(group, _retyped(kinds[group], kind), field(default_factory=kind)) for group, kind in pairs], bases=(Config,)
    )


def _retyped(hint: Any, kind: type) -> Any:
    """Return a type hint with another type and the same marks."""
    return Annotated[(kind, *hint.__metadata__)] if get_origin(hint) is Annotated else kind
