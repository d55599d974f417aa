"""Settings under ``cluster``, passed to NCCL and gloo through the environment variables that they read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from petra.errors import alternatives, invalid, require

from ..config.schema import ClusterConfig


def variables(cluster: ClusterConfig) -> dict[str, str]:
    """Return the environment variables, by name."""
    result = {
        "NCCL_DEBUG": cluster.debug,
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(cluster.heartbeat),
        "TORCH_FR_BUFFER_SIZE": str(cluster.flight_recorder),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(cluster.flight_recorder > 0)),
    }
    if cluster.interfaces is not None:
        interfaces = ",".join(cluster.interfaces)
        # NCCL matches prefixes of names unless the list begins with "=".
        result |= {"NCCL_SOCKET_IFNAME": f"={interfaces}", "GLOO_SOCKET_IFNAME": interfaces}
    if not cluster.infiniband:
        result["NCCL_IB_DISABLE"] = "1"
    if cluster.adapters is not None:
        result["NCCL_IB_HCA"] = "=" + ",".join(cluster.adapters)
    if cluster.dumps is not None:
        result["TORCH_FR_DUMP_TEMP_FILE"] = str(Path(cluster.dumps) / "rank")
    return result


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
    if cluster.dumps is not None:
        try:
            Path(cluster.dumps).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise invalid("cluster.dumps", "a folder that can be created", f"{cluster.dumps} ({error.strerror})") from error
    wanted = variables(cluster)
    return [
        f"{name}={found} from the environment is used; the configuration sets {value}"
        for name, value in wanted.items()
        if (found := os.environ.setdefault(name, value)) != value
    ]
