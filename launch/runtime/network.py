"""Settings under ``cluster``, passed to NCCL and gloo through the environment variables that they read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from petra.errors import alternatives, invalid, require

from ..config.schema import ClusterConfig

DEFAULTS = {
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "480",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Variables that every run sets: NCCL's warnings, and a dump of the last 2000 operations if one exceeds ``trainer.timeout``."""
DUMPS = "TORCH_FR_DUMP_TEMP_FILE"


def variables(cluster: ClusterConfig) -> dict[str, str]:
    """Return the environment variables, by name.

    Raises:
        ConfigError: If a value is a list, a mapping or null.
    """
    interfaces = ",".join(cluster.interfaces or ())
    # NCCL matches prefixes of names unless the list begins with "=".
    named = {"NCCL_SOCKET_IFNAME": f"={interfaces}", "GLOO_SOCKET_IFNAME": interfaces} if interfaces else {}
    for name, value in cluster.env.items():
        require(isinstance(value, str | int | float), f"cluster.env.{name}", "a text or a number", value)
    return {**DEFAULTS, **named, **{name: str(value) for name, value in cluster.env.items()}}


def set_variables(cluster: ClusterConfig) -> list[str]:
    """Set the variables in this process. Call it before the process group is made.

    Variables that the environment already has keep their values.

    Returns:
        A note for each variable whose value in the environment differs from the configuration.

    Raises:
        ConfigError: If this machine doesn't have an interface, or the folder for dumps can't be created.
    """
    available = [name for _, name in socket.if_nameindex()]
    for name in cluster.interfaces or []:
        require(name in available, "cluster.interfaces", f"{alternatives(available)} on {socket.gethostname()}", name)
    wanted = variables(cluster)
    if DUMPS in wanted:
        folder = Path(wanted[DUMPS]).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise invalid(f"cluster.env.{DUMPS}", "a folder that can be created", f"{folder} ({error.strerror})") from error
    return [
        f"{name}={found} from the environment is used; the configuration sets {value}"
        for name, value in wanted.items()
        if (found := os.environ.setdefault(name, value)) != value
    ]
