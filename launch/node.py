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

With NPROC, the processes of the whole run are counted first, and the row "processes on this node" is the most that a node takes:
the first nodes are filled. ``NPROC=stages`` means one process for each stage, so with eight GPUs per node, RevNet-18 has 8 + 2
processes and RevNet-34 has 8 + 8 + 2. If the nodes together take fewer, all are used, and some processes run several stages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from petra.errors import require

from . import own_module
from .runtime.agent import run_agent, stop_before_start
from .runtime.rank import integer
from .runtime.terminal import command, parser_for

WORDS = ("auto", "cpu", "gpu")
STAGES = "stages"
TRAIN = "launch.train"


@dataclass(frozen=True)
class Node:
    """One node of a run.

    Attributes:
        nodes: Number of nodes.
        rank: Rank of this node.
        processes: Number of processes on this node, or ``auto``, ``cpu`` or ``gpu``.
        address: Address of node 0.
        port: Port on node 0.
    """

    nodes: int
    rank: int
    processes: str
    address: str
    port: int

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Node:
        """Read the variables above.

        Raises:
            ConfigError: If a variable is missing or has an invalid value.
        """
        name, value = _first(environment, "NNODES", "PET_NNODES", "SLURM_NNODES", default="1")
        least, _, most = value.partition(":")
        require(most in ("", least), name, "one number, since the number of stages is fixed", value)
        nodes = integer(name, least, 1)

        def of_node(*names: str, default: str) -> tuple[str, str]:
            name, value = _first(environment, *names, default=default if nodes == 1 else "")
            require(bool(value), name, f"a value on each of {nodes} nodes", "nothing")
            return name, value

        rank = integer(*of_node("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", default="0"), 0, nodes - 1)
        port = integer(*_first(environment, "MASTER_PORT", "PET_MASTER_PORT", default="29500"), 1, 65535)
        _, address = of_node("MASTER_ADDR", "PET_MASTER_ADDR", default="127.0.0.1")
        return Node(nodes, rank, _processes(environment, nodes, rank), address, port)

    def flags(self) -> list[str]:
        """Return the arguments of torchrun. A single node takes a free port, so that several runs can share a machine."""
        if self.nodes == 1:
            return ["--standalone", "--nproc-per-node", self.processes]
        return [
            *("--nnodes", str(self.nodes), "--node-rank", str(self.rank), "--nproc-per-node", self.processes),
            *("--rdzv-backend", "static", "--master-addr", self.address, "--master-port", str(self.port)),
        ]


@command
def main(arguments: list[str] | None = None) -> None:
    """Run the processes of this node."""
    stop_before_start()
    parser = parser_for(__doc__)
    parser.add_argument("--module", default=TRAIN, help="module to run: launch.train (default) or launch.doctor")
    options, overrides = parser.parse_known_args(arguments)
    node = Node.from_environment(os.environ)
    if wanted := os.environ.get("NPROC"):
        found = shares(wanted, node, options.module, overrides)
        if not found:
            return
        node = replace(node, processes=str(found[node.rank]))
    run_agent(node.flags(), own_module(options.module), overrides)


def shares(wanted: str, node: Node, module: str, overrides: list[str]) -> list[int]:
    """Return the number of processes on each node for a value of NPROC. The first nodes are filled; each node has at least one.

    The list is empty if the overrides only print something (``--cfg job``).

    Raises:
        PetraError: If the value or the configuration is invalid, or if there are more processes than room, or fewer than nodes.
    """
    valid = wanted == STAGES or (wanted.isdecimal() and int(wanted) >= 1)
    require(valid, "NPROC", f"an integer >= 1, or {STAGES}", wanted)
    limits = [_processes(os.environ, node.nodes, rank) for rank in range(node.nodes)]
    automatic = all(limit in WORDS for limit in limits)
    fits = automatic or not {*limits} & {*WORDS}
    require(fits, "NPROC_PER_NODE", "only numbers in a list with NPROC", ",".join(limits))
    note, stages, dp, gpus = "", 0, 1, 0
    if wanted == STAGES:
        counted = count_stages(overrides, arguments_required=module == TRAIN)
        if not counted:
            return []
        require(len(counted) == 1, "NPROC", "a number, since the runs have different stages", STAGES)
        ((model, stages, dp, gpus),) = counted
        note = f" for the {stages} stages of {model}" + (f" in each of {dp} replicas" if dp > 1 else "")
    room = [gpus] * node.nodes if automatic else [int(limit) for limit in limits]
    total = dp * max(1, min(stages, sum(room) // dp if any(room) else stages)) if stages else int(wanted)
    if not any(room):  # neither a variable nor GPUs limit them
        room = [-(-total // node.nodes)] * node.nodes
    accepted = f"{node.nodes} to {sum(room)} on {node.nodes} node(s) with {_sum(room)}"
    require(node.nodes <= total <= sum(room), "NPROC", accepted, total)
    found: list[int] = []
    for i, limit in enumerate(room):
        found.append(min(limit, total - sum(found) - (node.nodes - i - 1)))
    if node.rank == 0:
        print(f"{total} process(es){note}: {_sum(found)} on {node.nodes} node(s)", flush=True)
    return found


def count_stages(overrides: list[str], *, arguments_required: bool) -> set[tuple[str, int, int, int]]:
    """Return the model of each configuration, its stages, its replicas, and the GPUs of this node that it can use.

    Args:
        overrides: Arguments of the command.
        arguments_required: Refuse an empty command line, as training does.

    Raises:
        PetraError: If a configuration is invalid.
    """
    from .config.compose import command_line_configs
    from .config.schema import AUTO

    sys.argv[1:] = overrides
    configs = command_line_configs(required=arguments_required)
    import torch

    from .run.build import set_up
    from .runtime.rank import Process

    found = set()
    for config in configs:
        setup = set_up(config, Process(rank=0, world=2 * config.dp, local_rank=0, local_world=1))
        stages = setup.plan.model.blocks if config.trainer.stages == AUTO else setup.plan.stages
        gpus = torch.cuda.device_count() if setup.device.type == "cuda" else 0
        found.add((config.model.name, len(stages), config.dp, gpus))
    return found


def _sum(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))


def _processes(environment: Mapping[str, str], nodes: int, rank: int) -> str:
    name, value = _first(environment, "NPROC_PER_NODE", "PET_NPROC_PER_NODE", "SLURM_GPUS_ON_NODE", default="auto")
    values = value.split(",")
    require(len(values) in (1, nodes), name, f"one number, or one for each of {nodes} node(s)", value)
    mine = values[rank if len(values) > 1 else 0]
    return mine if mine in WORDS else str(integer(name, mine, 1))


def _first(environment: Mapping[str, str], *names: str, default: str) -> tuple[str, str]:
    """Return the first variable that is set, with its value; the first name and the default if none is."""
    return next(((name, environment[name]) for name in names if environment.get(name)), (names[0], default))


if __name__ == "__main__":
    main()
