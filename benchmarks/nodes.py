"""A run over several nodes, rehearsed on one machine: ``python -m benchmarks.nodes 8,2 model=revnet18 ...``.

Each node is an agent of its own, started as launch.node is on a cluster; 8,2 stands for a node of eight processes and one of two.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def run_nodes(processes: str, arguments: Sequence[str], timeout: float | None = None) -> list[int]:
    """Runs ``python -m launch.node arguments`` for each number in ``processes``; the status of each, once all have ended.

    Raises:
        subprocess.TimeoutExpired: after ``timeout`` seconds; all are ended then.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = processes.count(",") + 1
    environment = os.environ | {
        "NNODES": str(nodes),
        "NPROC_PER_NODE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-m", "launch.node", *arguments]
    agents = [subprocess.Popen(command, env=environment | {"NODE_RANK": str(rank)}) for rank in range(nodes)]
    try:
        return [agent.wait(timeout) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()


if __name__ == "__main__":
    sys.exit(max(run_nodes(sys.argv[1], sys.argv[2:])))
