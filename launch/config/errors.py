"""Errors of Hydra and OmegaConf as one line that names the key, what is expected, and what was found."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, ValidationError

from petra.errors import ConfigError, PetraError, alternatives, invalid

from .checks import Key, schema_keys
from .presets import purposes


def config_error(error: Exception, schema: type, overrides: Sequence[str] = ()) -> PetraError:
    """Return a one-line error for an error of Hydra or OmegaConf.

    Args:
        error: What Hydra or OmegaConf raised.
        schema: Dataclass whose fields are keys or groups of keys.
        overrides: Overrides on the command line, for errors that name no key.
    """
    if isinstance(error, OverrideParseException):
        return _unparsed(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return _unknown_file(str(error.missing_cfg_file))
    keys = schema_keys(schema)
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for found in causes:
        key = str(getattr(found, "full_key", None) or "")
        if isinstance(found, ConfigKeyError | AttributeError) and key:
            return ConfigError(f"{key}: no such key; {_suggestion(key, keys)}")
        if isinstance(found, MissingMandatoryValue) and key:
            return invalid(key, _expected(key, keys), "nothing")
        if isinstance(found, ValidationError) and key:
            return invalid(key, _expected(key, keys), _value(str(found)))
    line = (str(error).splitlines() or [type(error).__name__])[0]
    if line.startswith("Ambiguous value for argument"):
        line = "several values; add --multirun to train with each, or quote a value that contains commas: \"KEY='VALUE'\""
    named = [override for override in overrides if override in line or f"'{override.partition('=')[0]}'" in line]
    return ConfigError(_line(f"{' '.join(named or overrides) or getattr(error, 'full_key', None) or 'configuration'}: {line}"))


def _unparsed(error: OverrideParseException) -> PetraError:
    """Return the error for an override that Hydra can't parse, with a quoted value if that is what is missing."""
    key, equals, value = error.override.partition("=")
    if equals and re.fullmatch(r"[+~]*[\w./@]+", key) and value and not set(value) & set("[]{}'\"$"):
        return invalid(key, f"a value in Hydra's syntax; quote it twice in the shell: \"{key}='{value}'\"", value)
    reason = next(line for line in str(error).splitlines() if not line.startswith("Error parsing"))
    return invalid("command line", "an override in Hydra's syntax", _line(f"{error.override} ({reason})"))


def _unknown_file(path: str) -> PetraError:
    """Return the error for a file that a group doesn't have."""
    group, _, name = path.rpartition("/")
    while "/" in group:  # the files of a group may be in subfolders
        group, _, rest = group.rpartition("/")
        name = f"{rest}/{name}"
    files = list(purposes(group))
    near = get_close_matches(name, files, 1, 0.6)
    return invalid(group, alternatives([*near, *(file for file in files if file not in near)]), name)


def _suggestion(key: str, keys: Mapping[str, Key]) -> str:
    """Return the known key that is closest to ``key``: in the same group, or by its name in any group, or by its full name."""
    group, _, name = key.rpartition(".")
    siblings = {known.rpartition(".")[2]: known for known in keys if known.rpartition(".")[0] == group}
    anywhere = {known.rpartition(".")[2]: known for known in reversed(list(keys))}
    full = {known: known for known in keys} if not siblings else {}
    for names, wanted in ((siblings, name), (anywhere, name), (full, key)):
        if near := get_close_matches(wanted, names, 1, 0.7):
            return f"did you mean {names[near[0]]}?"
    return f"expected {alternatives(list(siblings or (known for known in keys if '.' not in known)))}"


def _expected(key: str, keys: Mapping[str, Key]) -> str:
    """Describe the values that a key accepts; ``key`` may have an index."""
    known = keys.get(re.sub(r"\[\d+\]", "", key))
    if known is None:
        return "a value"
    return f"a file ({key}=FILE) or its keys ({key}.KEY=VALUE)" if is_dataclass(known.kind) else known.expected


def _value(message: str) -> str:
    """Return the rejected value from a message of OmegaConf."""
    if "not Optional" in message:
        return "null"
    found = re.search(r"(?:[Vv]alue|convert) '(.*?)'|: (\w+) is not a", message, re.DOTALL)
    return _line(next(filter(None, found.groups()), "nothing") if found else message)


def _line(text: str) -> str:
    return " ".join(text.split())
