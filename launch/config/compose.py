"""From the command line to configurations."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import hydra
from omegaconf import DictConfig

from launch.config.errors import CONF, reason
from launch.config.schema import Config, register, to_config
from petra.errors import ConfigError, PetraError


def compose() -> list[DictConfig]:
    """The configurations that the command line asks for: one, several with ``--multirun``, none with ``--help`` or ``--cfg``.

    Raises:
        ConfigError: an override that can't be read, or that doesn't fit the schema.
    """
    register()
    configs: list[DictConfig] = []
    # Hydra otherwise prints its errors itself, in several lines.
    with patch.dict(os.environ, HYDRA_FULL_ERROR="1"), refusing(sys.argv[1:]):
        hydra.main(version_base="1.3", config_path=CONF, config_name="config")(configs.append)()
    return configs


def composed(overrides: Sequence[str]) -> Config:
    """The configuration of some overrides.

    Raises:
        ConfigError: as :func:`compose`.
    """
    register()
    with refusing(overrides), hydra.initialize_config_dir(CONF, version_base="1.3"):
        return to_config(hydra.compose("config", list(overrides)))


@contextmanager
def refusing(overrides: Sequence[str]) -> Iterator[None]:
    """Errors of Hydra inside, which are of many kinds, as :class:`petra.errors.ConfigError`."""
    try:
        yield
    except PetraError:
        raise
    except Exception as error:
        raise ConfigError(reason(error, Config, overrides)) from error
