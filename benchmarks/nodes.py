"""Rehearse a run over several nodes on one machine: ``python -m benchmarks.nodes 8,2 model=revnet18 ...``.

Starts one agent per node, as ``petra node`` does on a cluster. 8,2 stands for two nodes, with eight processes and two. The other
arguments are overrides of ``launch.train``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def run_nodes(processes: str, arguments: Sequence[str], timeout: float | None = None) -> list[int]:
    """Run ``petra node`` once per node, and return the exit status of each.

    Args:
        processes: Number of processes of each node, separated by commas.
        arguments: Arguments of ``petra node``.
        timeout: Seconds to wait for each node; None for no limit.

    Raises:
        subprocess.TimeoutExpired: If a node still runs after ``timeout``. All nodes are terminated.
    """
    nodes = processes.count(",") + 1
    environment = os.environ | {"NNODES": str(nodes), "NPROC_PER_NODE": processes}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "petra", "node", *arguments]
    return statuses([subprocess.Popen(command, env=environment | {"NODE_RANK": str(rank)}) for rank in range(nodes)], timeout)


def free_port() -> int:
    """Return a port of this machine that no program listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def statuses(agents: Sequence[subprocess.Popen[bytes]], timeout: float | None) -> list[int]:
    """Wait for the agents of all nodes, and return their exit statuses. No agent is left running.

    Raises:
        subprocess.TimeoutExpired: If an agent still runs after ``timeout`` seconds.
    """
    try:
        return [agent.wait(timeout) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, end="")
        sys.exit(len(sys.argv) < 2)
    sys.exit(max(run_nodes(sys.argv[1], sys.argv[2:])))


if __name__ == "__main__":
    main()
