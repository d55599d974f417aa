"""What Hydra and OmegaConf refuse, in one line: the key, what was found, what is accepted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, ValidationError

import conf
from petra.errors import ConfigError

CONF = str(Path(conf.__file__).parent)
_KINDS = {int: "integers", float: "numbers", bool: "true, false", str: "text"}


def reason(error: Exception, schema: type, overrides: Sequence[str] = ()) -> str:
    """One line that names the key, what was found and what is accepted.

    Args:
        schema: a dataclass whose fields are keys, or dataclasses of keys.
        overrides: of the command line, for an error that names none.
    """
    if isinstance(error, OverrideParseException):
        why = next(line for line in str(error).splitlines() if not line.startswith("Error parsing"))
        return _line(f"{error.override}: {why}, accepted are overrides as Hydra reads them")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        while group and not Path(CONF, group).is_dir():  # files of a group may stand in folders of it
            group, _, rest = group.rpartition("/")
            name = f"{rest}/{name}"
        folder = Path(CONF, group)
        accepted = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
        return f"{group}: found {name}, accepted are {', '.join(accepted)}"
    keys = schema_keys(schema)
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for found in causes:
        key = str(getattr(found, "full_key", None) or "")
        if isinstance(found, ConfigKeyError | AttributeError) and key:
            return f"{key}: no such key, {_nearest(key, keys)}"
        if isinstance(found, MissingMandatoryValue) and key:
            return f"{key}: found nothing, accepted are {_accepted(key, keys)}"
        if isinstance(found, ValidationError) and key:
            return f"{key}: found {_value(str(found))}, accepted are {_accepted(key, keys)}"
    line = (str(error).splitlines() or [type(error).__name__])[0]
    meant = [override for override in overrides if override in line or f"'{override.partition('=')[0]}'" in line]
    return _line(f"{' '.join(meant or overrides) or getattr(error, 'full_key', None) or 'the configuration'}: {line}")


def require_lists(config: Any, prefix: str = "") -> None:
    """Looks into the lists of a configuration, whose elements OmegaConf doesn't check where they are lists or null.

    Raises:
        ConfigError: an element of another type.
    """
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if is_dataclass(value):
            require_lists(value, f"{prefix}{name}.")
        lists = [k for k in (kind, *get_args(kind)) if get_origin(k) is list]
        if isinstance(value, list) and lists and not all(type(v) is get_args(lists[0])[0] for v in value):
            raise ConfigError(f"{prefix}{name}: found {value}, accepted are {_named(kind)}")


def _nearest(key: str, keys: Mapping[str, Any]) -> str:
    """What somebody who wrote ``key`` may have meant."""
    group, _, name = key.rpartition(".")
    beside = {known.rpartition(".")[2]: known for known in keys if known.rpartition(".")[0] == group}
    anywhere = {known.rpartition(".")[2]: known for known in reversed(list(keys))}
    for names, wanted in ((beside, name), (anywhere, name), ({known: known for known in keys} if not beside else {}, key)):
        if near := get_close_matches(wanted, names, 1, 0.7):
            return f"the nearest is {names[near[0]]}"
    return f"accepted are {', '.join(beside or (known for known in keys if '.' not in known))}"


def schema_keys(form: type, prefix: str = "") -> dict[str, Any]:
    """All keys of the schema, groups included, with their types."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(form).items():
        found[prefix + name] = kind
        if is_dataclass(kind):
            found |= schema_keys(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
    return found


def _accepted(key: str, keys: Mapping[str, Any]) -> str:
    kind = keys.get(re.sub(r"\[\d+\]", "", key))
    return f"keys of {key}, {key}.<key>=<value>" if is_dataclass(kind) else _named(kind)


def _named(kind: Any) -> str:
    """A type as the values that it accepts."""
    kinds = get_args(kind) if NoneType in get_args(kind) else (kind,)
    null = "null or " if NoneType in kinds else ""
    (one,) = (k for k in kinds if k is not NoneType)
    return f"{null}lists of {_KINDS[get_args(one)[0]]}" if get_origin(one) is list else null + _KINDS.get(one, "values of its type")


def _value(message: str) -> str:
    """What was found, from a message of OmegaConf."""
    if "not Optional" in message:
        return "null"
    found = re.search(r"(?:[Vv]alue|convert) '(.*?)'|: (\w+) is not a", message, re.DOTALL)
    return _line(next(filter(None, found.groups()), "nothing") if found else message)


def _line(text: str) -> str:
    return " ".join(text.split())
