"""Run a Compose file or a Kubeflow TrainJob on this machine, without Docker and Kubernetes: one process group for each node.

python -m stress.manifests docker/compose.yaml
python -m stress.manifests launch/templates/kubeflow.yaml model.width=0.0625 trainer.device=cpu data.images=2000

Each node is the command of its container with the variables that Docker or Kubeflow Trainer 2 gives it. One folder stands for the
shared volume. Overrides are added to those of the file. The exit status is the largest of all nodes. Differences from a cluster:
all nodes have this machine's address, so a free port replaces the file's, and limits of memory and GPUs do not apply.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.nodes import free_port, statuses
from tests.commands import ROOT


@dataclass(frozen=True)
class Container:
    """The container of one node.

    Attributes:
        name: Name by which other nodes reach it.
        command: Entry point and arguments.
        environment: Variables in addition to the image's.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


def containers(path: Path, variables: Mapping[str, str]) -> list[Container]:
    """Return the containers that a file describes.

    Args:
        path: Compose file, or manifest with a TrainingRuntime and a TrainJob.
        variables: Values for ``${NAME:-default}`` in a Compose file.
    """
    documents = list(yaml.safe_load_all(path.read_text()))
    if "services" in documents[0]:
        return composed(documents[0], variables)
    runtime, job = documents
    return trained(runtime, job)


def substituted(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``${NAME:-default}`` as Compose does: an empty variable counts as absent."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1]) or found[2], text)


def composed(content: Mapping[str, Any], variables: Mapping[str, str]) -> list[Container]:
    """Return the containers of a Compose file. The image's entry point precedes their commands."""
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)[-1])
    result = []
    for name, service in content["services"].items():
        command = (*entry, *shlex.split(substituted(service["command"], variables)))
        own = {key: substituted(value, variables) for key, value in service["environment"].items()}
        result.append(Container(name, command, own))
    return result


def trained(runtime: Mapping[str, Any], job: Mapping[str, Any]) -> list[Container]:
    """Return the containers of a TrainJob, with the variables that Kubeflow Trainer's torch policy sets."""
    replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    (template,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    nodes = trainer.get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
    hosts = [f"{name}-{replicated['name']}-0-{rank}.{name}" for rank in range(nodes)]
    result = []
    for rank, host in enumerate(hosts):
        environment = {
            "PET_NNODES": str(nodes),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": hosts[0],
            "PET_MASTER_PORT": "29400",
            **{variable["name"]: variable["value"] for variable in trainer.get("env", ())},
        }
        result.append(Container(host, (*trainer.get("command", template["command"]), *trainer["args"]), environment))
    return result


def run(nodes: Sequence[Container], folder: Path, overrides: Sequence[str], timeout: float | None = None) -> list[int]:
    """Run all nodes in a folder that they share, and return their exit statuses. No process is left running.

    Raises:
        subprocess.TimeoutExpired: If a node still runs after ``timeout`` seconds.
    """
    port = str(free_port())
    here = {node.name: "127.0.0.1" for node in nodes}
    agents = []
    for node in nodes:
        own = {key: here.get(value, value) for key, value in node.environment.items()}
        own |= {key: port for key in own if key.endswith("MASTER_PORT")}
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **own}
        python, *words = node.command
        assert python == "python3"
        agents.append(subprocess.Popen([sys.executable, *words, *overrides], cwd=folder, env=variables))
    return statuses(agents, timeout)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="Compose file or Kubeflow manifest")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        nodes = containers(options.file, os.environ)
        for node in nodes:
            print(f"{node.name}: {shlex.join([*node.command, *overrides])}", flush=True)
        sys.exit(max(map(abs, run(nodes, Path(folder), overrides))))


if __name__ == "__main__":
    main()
