"""Run the Compose file and the Kubeflow TrainJob on this machine, without Docker and Kubernetes: one process group for each node.

``python -m stress.manifests [FILE ...]``. Each node is the command of its container with the variables that Docker or Kubeflow
Trainer 2 gives it, and trains a narrow network in two processes. One folder stands for the shared volume. Differences from a
cluster: all nodes have this machine's address, so a free port replaces the file's, and limits of memory and GPUs do not apply.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.nodes import free_port, statuses
from stress.frame import PATIENCE, SMALL, environment
from tests.structure import ROOT

FILES = ("docker/compose.yaml", "launch/templates/kubeflow.yaml")
NARROW = (*SMALL, "data.images=40", "model=revnet18", "method=petra", "trainer.epochs=1")


class Container(NamedTuple):
    """The container of one node: its name, entry point with arguments, and variables in addition to the image's."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


def substituted(text: str) -> str:
    """Replace each ``${NAME:-default}`` of a Compose file by its default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def composed(content: Mapping[str, Any]) -> list[Container]:
    """Return the containers of a Compose file. The image's entry point precedes their commands."""
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)[-1])
    return [
        Container(
            name,
            (*entry, *shlex.split(substituted(service["command"]))),
            {key: substituted(value) for key, value in service["environment"].items()},
        )
        for name, service in content["services"].items()
    ]


def trained(runtime: Mapping[str, Any], job: Mapping[str, Any]) -> list[Container]:
    """Return the containers of a TrainJob, with the variables that Kubeflow Trainer's torch policy sets."""
    replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    (template,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    nodes = trainer.get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
    hosts = [f"{name}-{replicated['name']}-0-{rank}.{name}" for rank in range(nodes)]
    command = (*trainer.get("command", template["command"]), *trainer["args"])
    common = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": hosts[0],
        "PET_MASTER_PORT": "29400",
        **{variable["name"]: variable["value"] for variable in trainer.get("env", ())},
    }
    return [Container(host, command, {**common, "PET_NODE_RANK": str(rank)}) for rank, host in enumerate(hosts)]


def run(path: Path, folder: Path) -> None:
    """Run all nodes of a file in a folder that they share.

    Raises:
        AssertionError: If a node fails, or if the nodes do not train together.
    """
    documents = list(yaml.safe_load_all(path.read_text()))
    nodes = composed(documents[0]) if "services" in documents[0] else trained(*documents)
    port, here, agents = str(free_port()), {node.name: "127.0.0.1" for node in nodes}, []
    for node in nodes:
        own = {key: port if key.endswith("MASTER_PORT") else here.get(value, value) for key, value in node.environment.items()}
        variables = environment(**{**own, "NPROC_PER_NODE": "1"})
        python, *words = node.command
        assert python == "python3"
        print(f"{node.name}: {shlex.join(node.command)}", flush=True)
        agents.append(subprocess.Popen([sys.executable, *words, *NARROW], cwd=folder, env=variables))
    assert statuses(agents, PATIENCE) == [0] * len(nodes)
    assert json.loads((folder / "run" / "summary.json").read_text())["processes"] == 2


def main() -> None:
    """Entry point."""
    for name in sys.argv[1:] or FILES:
        with tempfile.TemporaryDirectory() as folder:
            run(ROOT / name, Path(folder))
        print(f"{name}: the nodes trained together", flush=True)


if __name__ == "__main__":
    main()
