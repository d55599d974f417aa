"""What a cluster asks of NCCL and gloo: the settings under ``cluster`` as the environment variables that the two read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from launch.config.schema import ClusterConfig
from petra.errors import ConfigError

LEVELS = ("VERSION", "WARN", "INFO", "TRACE")


def variables(cluster: ClusterConfig) -> dict[str, str]:
    """The variables, by name.

    Raises:
        ConfigError: a value that can't be meant.
    """
    if cluster.debug not in LEVELS:
        raise ConfigError(f"cluster.debug: found {cluster.debug}, accepted are {', '.join(LEVELS)}")
    for key, found, least in (("heartbeat", cluster.heartbeat, 1), ("flight_recorder", cluster.flight_recorder, 0)):
        if found < least:
            raise ConfigError(f"cluster.{key}: found {found}, accepted are integers >= {least}")
    for key, names in (("interfaces", cluster.interfaces), ("adapters", cluster.adapters)):
        if names is not None and not all(names or [""]):
            raise ConfigError(f"cluster.{key}: found {names}, accepted are null or a list of names")
    result = {
        "NCCL_DEBUG": cluster.debug,
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(cluster.heartbeat),
        "TORCH_FR_BUFFER_SIZE": str(cluster.flight_recorder),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(cluster.flight_recorder > 0)),
    }
    if cluster.interfaces is not None:
        interfaces = ",".join(cluster.interfaces)
        result |= {"NCCL_SOCKET_IFNAME": f"={interfaces}", "GLOO_SOCKET_IFNAME": interfaces}  # NCCL takes prefixes unless told "="
    if not cluster.infiniband:
        result["NCCL_IB_DISABLE"] = "1"
    if cluster.adapters is not None:
        result["NCCL_IB_HCA"] = "=" + ",".join(cluster.adapters)
    if cluster.dumps is not None:
        result["TORCH_FR_DUMP_TEMP_FILE"] = str(Path(cluster.dumps) / "rank")
    return result


def apply(cluster: ClusterConfig) -> list[str]:
    """Sets the variables in this process, before its group is made; returns those for which the environment has another value.

    Raises:
        ConfigError: an interface that this machine lacks, or a folder that can't be made.
    """
    has = [name for _, name in socket.if_nameindex()]
    for name in cluster.interfaces or []:
        if name not in has:
            raise ConfigError(f"cluster.interfaces: found {name}, accepted on {socket.gethostname()} are {', '.join(has)}")
    if cluster.dumps is not None:
        try:
            Path(cluster.dumps).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cluster.dumps: {cluster.dumps} can't be made ({error.strerror})") from error
    wanted = variables(cluster)
    return [
        f"{name}={found} in the environment stays; the configuration would set {value}"
        for name, value in wanted.items()
        if (found := os.environ.setdefault(name, value)) != value
    ]
