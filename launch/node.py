"""This node's processes among those of all nodes: the same command on each, ``python -m launch.node model=revnet18 ...``.

Where the node stands is read from environment variables; the first of each row that is set counts:

| meaning | by hand | Kubernetes (Kubeflow) | Slurm | else |
|---|---|---|---|---|
| number of nodes | NNODES | PET_NNODES | SLURM_NNODES | 1 |
| this node's number, from 0 | NODE_RANK | PET_NODE_RANK | SLURM_NODEID | 0 if it is alone |
| processes on this node | NPROC_PER_NODE | PET_NPROC_PER_NODE | SLURM_GPUS_ON_NODE | auto |
| address of node 0 | MASTER_ADDR | PET_MASTER_ADDR | first of SLURM_JOB_NODELIST | 127.0.0.1 if it is alone |
| port on node 0 | MASTER_PORT | PET_MASTER_PORT | – | 29500 |

The number of processes is an integer, ``auto`` (one for each GPU, or for each core where there is none), or a list with one for
each node: 8,2. Ranks count through the nodes in their order, so neighbouring stages share a node wherever they can.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from launch.runtime.agent import run_agent
from petra.errors import ConfigError

WORDS = ("auto", "cpu", "gpu")


@dataclass(frozen=True)
class Node:
    """One node's place: ``rank`` among ``nodes``, with ``processes`` of its own (a number, auto, cpu or gpu)."""

    nodes: int
    rank: int
    processes: str
    address: str
    port: int

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Node:
        """Reads the variables above.

        Raises:
            ConfigError: one is missing, or isn't what it should be.
        """
        name, value = _first(environment, "NNODES", "PET_NNODES", "SLURM_NNODES") or ("NNODES", "1")
        least, _, most = value.partition(":")
        if most not in ("", least):
            raise ConfigError(f"{name}: found {value}, accepted is one number, since the number of stages is fixed")
        nodes = _integer(name, least, 1)
        name, value = _first(environment, "NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID") or _alone("NODE_RANK", "0", nodes)
        rank = _integer(name, value, 0, nodes - 1)
        name, value = _first(environment, "MASTER_PORT", "PET_MASTER_PORT") or ("MASTER_PORT", "29500")
        port = _integer(name, value, 1, 65535)
        found = _first(environment, "MASTER_ADDR", "PET_MASTER_ADDR")
        if found is None and "SLURM_JOB_NODELIST" in environment:
            found = ("SLURM_JOB_NODELIST", first_host(environment["SLURM_JOB_NODELIST"]))
        _, address = found or _alone("MASTER_ADDR", "127.0.0.1", nodes)
        return Node(nodes, rank, _processes(environment, nodes, rank), address, port)

    def flags(self) -> list[str]:
        """The arguments of torchrun that say the same; a node that is alone takes a free port, so that runs can share a machine."""
        if self.nodes == 1:
            return ["--standalone", "--nproc-per-node", self.processes]
        return [
            *("--nnodes", str(self.nodes), "--node-rank", str(self.rank), "--nproc-per-node", self.processes),
            *("--rdzv-backend", "static", "--master-addr", self.address, "--master-port", str(self.port)),
        ]


def main(arguments: list[str] | None = None) -> None:
    """Joins the other nodes and runs this one's processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--module", default="launch.train", help="what to run: launch.train, or launch.doctor")
    options, overrides = parser.parse_known_args(arguments)
    try:
        node = Node.from_environment(os.environ)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    run_agent(node.flags(), options.module, overrides)


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: ``gpu[003-010,12],login`` is gpu003."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).split(",")[0]


def _processes(environment: Mapping[str, str], nodes: int, rank: int) -> str:
    found = _first(environment, "NPROC_PER_NODE", "PET_NPROC_PER_NODE", "SLURM_GPUS_ON_NODE")
    name, value = found or ("NPROC_PER_NODE", "auto")
    values = value.split(",")
    if len(values) not in (1, nodes):
        raise ConfigError(f"{name}: found {value}, accepted are one number, or {nodes} for {nodes} nodes")
    mine = values[rank if len(values) > 1 else 0]
    return mine if mine in WORDS else str(_integer(name, mine, 1))


def _first(environment: Mapping[str, str], *names: str) -> tuple[str, str] | None:
    return next(((name, environment[name]) for name in names if environment.get(name)), None)


def _alone(name: str, value: str, nodes: int) -> tuple[str, str]:
    if nodes > 1:
        raise ConfigError(f"{name}: not given, and needed on each of {nodes} nodes")
    return name, value


def _integer(name: str, value: str, least: int, most: int | None = None) -> int:
    accepted = f"integers >= {least}" if most is None else f"integers from {least} to {most}"
    if not value.isdecimal() or int(value) < least or (most is not None and int(value) > most):
        raise ConfigError(f"{name}: found {value}, accepted are {accepted}")
    return int(value)


if __name__ == "__main__":
    main()
