"""An installed wheel: its names, and its commands in an empty folder, with other packages of the names ``launch`` and ``conf``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from tests.structure import ROOT

pytestmark = pytest.mark.processes
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


def run_module(site: Path, cwd: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_installs_only_petra(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"petra"}
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    assert {f"petra/{name}" for name in here} <= {*names}
    assert {"petra/py.typed", "petra/launch/templates/slurm.sbatch"} <= {*names}


def test_train_in_two_processes_export_evaluate_and_load_in_pytorch(site: Path, tmp_path: Path) -> None:
    """The sweep starts the processes of its run as petra train --nproc does."""
    swept = run_module(site, tmp_path, "petra", "sweep", "--processes", "2", "--out", "out", *TINY, "trainer.export=pt")
    assert "1 of 1 runs finished" in swept
    numbers = json.loads(run_module(site, tmp_path, "petra", "evaluate", "out/run"))
    assert numbers["images"] == 4
    weights = torch.load(tmp_path / "out" / "run" / "model.pt", weights_only=True)
    assert any("head" in name for name in weights)
