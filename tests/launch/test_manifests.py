"""Files for other programs: Dockerfile, Compose, Slurm, Kubeflow, SkyPilot. The program or its schema reads each, if installed."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.node import Node

ROOT = Path(__file__).parents[2]


def checked(tool: str, *arguments: str) -> str:
    """Return the output of a tool that must succeed. Skip the test if the tool is not installed."""
    path = shutil.which(tool, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([path, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_hadolint_accepts_the_dockerfile() -> None:
    assert checked("hadolint", "docker/Dockerfile") == ""


def test_shellcheck_accepts_the_scripts() -> None:
    assert checked("shellcheck", "docker/two_nodes.sh", "launch/templates/slurm.sbatch") == ""


def test_docker_compose_reads_both_nodes() -> None:
    found = yaml.safe_load(checked("docker-compose", "-f", "docker/compose.yaml", "config"))
    assert {"node0", "node1"} == found["services"].keys()


def test_composed_nodes_find_their_places() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    for rank in (0, 1):
        service = services[f"node{rank}"]
        environment = service["environment"] | {"NPROC_PER_NODE": "1"}
        assert Node.from_environment(environment) == Node(2, rank, "1", "node0", 29500)
        gpus = service["deploy"]["resources"]["reservations"]["devices"]
        assert gpus == [{"driver": "nvidia", "device_ids": [str(rank)], "capabilities": ["gpu"]}]
        assert service["ulimits"]["memlock"] == -1


def kubeflow() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "launch" / "templates" / "kubeflow.yaml").read_text()))


def test_kubeflows_schema_accepts_the_manifests() -> None:
    pytest.importorskip("kubeflow_trainer_api")
    models = importlib.import_module("kubeflow_trainer_api.models")
    runtime, job = kubeflow()
    for manifest in (runtime, job):
        schema = getattr(models, f"TrainerV1alpha1{manifest['kind']}")
        assert schema.from_dict(manifest).to_dict() == manifest  # the schema ignores unknown keys


def test_the_training_uses_the_runtime_and_the_image_is_started_as_built() -> None:
    runtime, job = kubeflow()
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    pod = node["template"]["spec"]["template"]["spec"]
    assert [node["name"], pod["containers"][0]["name"]] == ["node", "node"]  # names that Kubeflow requires
    entrypoint = f"ENTRYPOINT {json.dumps(pod['containers'][0]['command'])}"
    assert entrypoint in (ROOT / "docker" / "Dockerfile").read_text()
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def started(script: str, tmp_path: Path, environment: dict[str, str], *arguments: str) -> tuple[Node, list[str]]:
    """Run a script with a fake ``python`` that records its arguments and environment. Return the node and the arguments."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, lines in (
        ("python", f'printf "%s\\n" "$@" > {tmp_path}/arguments; env -0 > {tmp_path}/environment'),
        ("srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'),
        ("scontrol", '[ "$*" = "show hostnames gpu[3-4]" ] && printf "gpu3\\ngpu4\\n"'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tools / name).chmod(0o755)
    variables = environment | {"PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", script, "job", *arguments], env=variables, check=True, timeout=60)
    found = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().split("\0") if line)
    return Node.from_environment(found), (tmp_path / "arguments").read_text().splitlines()


def test_slurm_starts_a_node(tmp_path: Path) -> None:
    slurm = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_GPUS_ON_NODE": "8"}
    slurm |= {"SLURM_JOB_NODELIST": "gpu[3-4]", "SLURM_JOB_ID": "123456"}
    script = (ROOT / "launch" / "templates" / "slurm.sbatch").read_text()
    node, arguments = started(script, tmp_path, slurm, "k=2", "run_dir='two words'")
    assert node == Node(2, 1, "8", "gpu3", 20000 + 3456)
    assert arguments == ["-m", "petra", "node", "k=2", "run_dir='two words'"]


def test_skypilot_starts_a_node(tmp_path: Path) -> None:
    task = yaml.safe_load((ROOT / "launch" / "templates" / "skypilot.yaml").read_text())
    assert task.keys() == {"name", "workdir", "num_nodes", "resources", "envs", "setup", "run"}
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    sky |= {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6"}
    node, arguments = started(task["run"], tmp_path, sky | task["envs"])
    assert node == Node(2, 1, "8", "10.0.0.5", 29500)
    assert arguments == ["-m", "petra", "node", "model=revnet34", "data=synthetic", "trainer.epochs=1", "checkpoint.keep=0"]
