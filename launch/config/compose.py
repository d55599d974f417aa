"""Compose configurations from the command line or from a list of overrides, with Hydra."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from petra.errors import ConfigError, PetraError, alternatives, first_line, invalid, require
from petra.method import METHODS

from . import CONF
from .read import configurations, near_first, to_config, unknown
from .schema import GROUPS, SECTIONS, Config, keys


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
    expected = "arguments such as experiment=demo (about a minute), or trainer.epochs=300 for the defaults; --help lists all"
    require(not required or len(sys.argv) > 1, "command line", expected, "none")
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
