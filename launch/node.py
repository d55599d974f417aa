"""Train in the processes of several nodes. Run the same command on every node: ``petra node model=revnet18 ...``.

Environment variables describe the node. In each row, the first variable that is set counts:

    meaning                 set by hand     Kubernetes (Kubeflow)  Slurm              default
    number of nodes         NNODES          PET_NNODES             SLURM_NNODES       1
    rank of this node       NODE_RANK       PET_NODE_RANK          SLURM_NODEID       0 for a single node
    processes on this node  NPROC_PER_NODE  PET_NPROC_PER_NODE     SLURM_GPUS_ON_NODE auto
    address of node 0       MASTER_ADDR     PET_MASTER_ADDR        –                  127.0.0.1 for a single node
    port on node 0          MASTER_PORT     PET_MASTER_PORT        –                  29500

The number of processes is an integer, ``auto`` (one for each GPU, or for each core without a GPU), or a list with a number for
each node, such as 8,2. Ranks are assigned node by node, so neighbouring stages share a node wherever possible.

Processes without a stage are idle: with eight GPUs per node, RevNet-18 has stages in 8 + 2 of 16 processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from petra.errors import require

from .runtime.agent import ONE_MACHINE, run_agent, stop_before_start
from .runtime.machine import available_cores, wait_for_address
from .runtime.rank import integer
from .runtime.terminal import command, parser_for

WORDS = ("auto", "cpu", "gpu")


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the processes of this node."""
    stop_before_start()
    parser = parser_for(__doc__)
    parser.add_argument("--module", default="launch.train", help="launch.train (default), launch.doctor or launch.selftest")
    options, overrides = parser.parse_known_args(arguments)
    chosen = flags(os.environ)
    count = chosen.index("--nproc-per-node") + 1
    if (chosen[count] == "auto" and not _has_gpu()) or chosen[count] == "cpu":  # torchrun doesn't count the quota of a container
        chosen[count] = str(available_cores())
    if "--master-addr" in chosen:
        wait_for_address(chosen[chosen.index("--master-addr") + 1], "MASTER_ADDR")
    run_agent(chosen, options.module.removeprefix("launch."), overrides)


def _has_gpu() -> bool:
    import torch

    return torch.accelerator.is_available()


def flags(environment: Mapping[str, str]) -> list[str]:
    """Return the arguments of torchrun. A single node takes a free port, so that several runs can share a machine.

    Raises:
        ConfigError: If a variable is missing or has an invalid value.
    """
    name, value = _first(environment, "NNODES", "PET_NNODES", "SLURM_NNODES", default="1")
    least, _, most = value.partition(":")
    require(most in ("", least), name, "one number, since the number of stages is fixed", value)
    nodes = integer(name, least, 1)
    local = environment.get("SLURM_LOCALID", "0")
    require(local in ("0", ""), "SLURM_LOCALID", "0: one petra node on each machine (srun --ntasks-per-node 1)", local)

    def of_node(*names: str) -> tuple[str, str]:
        name, value = _first(environment, *names, default="0" if nodes == 1 else "")
        require(bool(value), name, f"a value on each of {nodes} nodes", "nothing")
        return name, value

    rank = integer(*of_node("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID"), 0, nodes - 1)
    name, value = _first(environment, "NPROC_PER_NODE", "PET_NPROC_PER_NODE", "SLURM_GPUS_ON_NODE", default="auto")
    counts = value.split(",")
    require(len(counts) in (1, nodes), name, f"one number, or one for each of {nodes} node(s)", value)
    own = counts[rank if len(counts) > 1 else 0]
    processes = ["--nproc-per-node", own if own in WORDS else str(integer(name, own, 1))]
    port = integer(*_first(environment, "MASTER_PORT", "PET_MASTER_PORT", default="29500"), 1, 65535)
    if nodes == 1:
        return [*ONE_MACHINE, *processes]
    _, address = of_node("MASTER_ADDR", "PET_MASTER_ADDR")
    node = ["--nnodes", str(nodes), "--node-rank", str(rank), *processes]
    return [*node, "--rdzv-backend", "static", "--master-addr", address, "--master-port", str(port)]


def _first(environment: Mapping[str, str], *names: str, default: str) -> tuple[str, str]:
    """Return the first variable that is set, with its value; the first name and the default if none is."""
    return next(((name, environment[name]) for name in names if environment.get(name)), (names[0], default))
