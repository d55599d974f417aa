"""Files for other programs (Dockerfile, Compose, Slurm, Kubeflow), and the commands of an installed wheel."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
import yaml

from launch.node import flags
from tests.structure import ROOT


def test_kubeflows_schema_accepts_the_manifests() -> None:
    pytest.importorskip("kubeflow_trainer_api")
    models = importlib.import_module("kubeflow_trainer_api.models")
    for manifest in yaml.safe_load_all((ROOT / "launch" / "templates" / "kubeflow.yaml").read_text()):
        if manifest["kind"] == "PersistentVolumeClaim":
            continue
        schema = getattr(models, f"TrainerV1alpha1{manifest['kind']}")
        assert schema.from_dict(manifest).to_dict() == manifest  # the schema ignores unknown keys


def test_the_manifest_has_a_claim_for_each_volume() -> None:
    """One for runs, which every node writes, and one for data."""
    text = (ROOT / "launch" / "templates" / "kubeflow.yaml").read_text()
    manifests = {(found["kind"], found["metadata"]["name"]): found["spec"] for found in yaml.safe_load_all(text)}
    pod = manifests["TrainingRuntime", "petra"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {mounts[name]: claim for name, claim in claims.items()} == {"/workspace/runs": "petra-runs", "/data": "petra-data"}
    modes = {claim: manifests["PersistentVolumeClaim", claim]["accessModes"] for claim in claims.values()}
    assert modes == {"petra-runs": ["ReadWriteMany"], "petra-data": ["ReadOnlyMany"]}


def started(script: str, tmp_path: Path, environment: dict[str, str], *arguments: str) -> tuple[list[str], list[str]]:
    """Run a script with a fake ``python`` that records its arguments and environment. Return torchrun's flags and the arguments."""
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
    subprocess.run(["bash", "-c", script, "job", *arguments], env=variables, timeout=60, check=True)
    found = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().split("\0") if line)
    return flags(found), (tmp_path / "arguments").read_text().splitlines()


SLURM = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "gpu[3-4]"}
SLURM |= {"SLURM_JOB_ID": "123456"}


def test_slurm_starts_a_node(tmp_path: Path) -> None:
    script = (ROOT / "launch" / "templates" / "slurm.sbatch").read_text()
    found, arguments = started(script, tmp_path, SLURM, "k=2", "run_dir='two words'")
    assert found[:6] == ["--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "8"]
    assert found[-3:] == ["gpu3", "--master-port", str(20000 + 3456)]
    assert arguments == ["-m", "petra", "node", "k=2", "run_dir='two words'"]


TINY = (
    *("model=revnet18", "model.width=0.25", "data=synthetic", "data.images=16", "data.batch_size=4", "k=1"),
    *("trainer.epochs=1", "trainer.limit_batches=2", "trainer.device=cpu"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this checkout, without the network."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True, timeout=120)
    (path,) = folder.glob("petra-*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel as pip does, beside two other packages that must not be imported."""
    folder = tmp_path_factory.mktemp("site")
    ZipFile(wheel).extractall(folder)
    for name in ("launch", "conf"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('another package, {name}')\n")
    return folder


def test_a_wheel_installs_only_petra(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"petra"}
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    assert {f"petra/{name}" for name in here} <= {*names}
    assert {"petra/py.typed", "petra/launch/templates/slurm.sbatch"} <= {*names}


def test_train_in_two_processes_export_evaluate_and_load_in_pytorch(site: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    printed = list[str]()
    for words in (["train", "--nproc", "2", "run_dir=out", *TINY, "trainer.export=pt"], ["evaluate", "out"]):
        command = [sys.executable, "-m", "petra", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    assert json.loads(printed[-1])["images"] == 4
    weights = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert any("head" in name for name in weights)
