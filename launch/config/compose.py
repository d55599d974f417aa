"""Compose configurations from the command line or from a list of overrides, with Hydra."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import hydra
from omegaconf import DictConfig

from petra.errors import PetraError, invalid, require

from . import CONF
from .errors import config_error
from .schema import Config, register, to_config


def compose_command_line() -> list[DictConfig]:
    """Return the configurations on the command line: one, several with ``--multirun``, none with ``--help`` or ``--cfg``.

    Raises:
        ConfigError: If an override can't be parsed or doesn't fit the schema.
    """
    register()
    configs: list[DictConfig] = []
    # Without HYDRA_FULL_ERROR, Hydra prints its errors itself, in several lines.
    with patch.dict(os.environ, HYDRA_FULL_ERROR="1"), hydra_errors(sys.argv[1:]):
        hydra.main(version_base="1.3", config_path=CONF, config_name="config")(configs.append)()
    return configs


def training_configs() -> list[Config]:
    """Return the checked configurations on the command line of a command that trains.

    Raises:
        ConfigError: If there are no arguments, or if a configuration is invalid.
    """
    require_arguments(sys.argv[1:])
    return [to_config(config) for config in compose_command_line()]


def require_arguments(overrides: Sequence[str]) -> None:
    """Check that there are overrides, because the defaults are a run of hours that nobody starts by accident.

    Raises:
        ConfigError: If there are none.
    """
    if not overrides:
        expected = "arguments such as experiment=demo (about a minute), or trainer.epochs=300 for the defaults; --help lists all"
        raise invalid("command line", expected, "none")


def compose_overrides(overrides: Sequence[str]) -> Config:
    """Return the configuration that the overrides describe.

    Raises:
        ConfigError: If an override can't be parsed or doesn't fit the schema.
    """
    register()
    with hydra_errors(overrides), hydra.initialize_config_dir(CONF, version_base="1.3"):
        return to_config(hydra.compose("config", list(overrides)))


def search_path(folder: str) -> str:
    """Return the override by which Hydra finds the files of ``folder``, too, as with its flag ``--config-dir``.

    Raises:
        ConfigError: If there is no such folder.
    """
    path = Path(folder).resolve()
    require(path.is_dir(), "--config-dir", "a folder", folder)
    quoted = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"hydra.searchpath=['file://{quoted}']"


@contextmanager
def hydra_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Convert errors of Hydra in the body, which have many classes, to :class:`petra.errors.ConfigError`."""
    try:
        yield
    except PetraError:
        raise
    except Exception as error:
        raise config_error(error, Config, overrides) from error
