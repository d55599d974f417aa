"""What a failed part of the self-test leaves behind: output of all ranks, dumps, and an archive with what a report needs."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from importlib.metadata import distributions
from pathlib import Path

from ..doctor.machine import PREFIXES
from ..runtime.rank import DUMPS

SHOWN = re.compile(r"s without progress, |Watchdog caught collective|^error: |^[\w.]*Error: |NCCL WARN|CUDA error")
"""Lines of a rank's output that tell why a part failed."""
WAITING = re.compile(r"waits in petra/(engine/options/rounds|transport/(lockstep|edge))|Watchdog caught")
"""Lines of a rank that waits for its GPU or another rank."""
OWN = (*PREFIXES, "CUDA_", "SLURM_", "PET_", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Beginnings of the names of environment variables in the archive; none of a name with one of :data:`SECRET`."""
SECRET = re.compile("TOKEN|SECRET|PASS|KEY|CRED|AUTH", re.IGNORECASE)
MACHINE = "nvidia-smi; nvidia-smi topo -m; ibstat; uname -a; df -h /dev/shm"
"""Commands that describe the machine."""


def variables(folder: Path) -> dict[str, str]:
    """Return environment variables with which processes write dumps and NCCL's log into a folder."""
    return {
        DUMPS: str(folder / "dump_"),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
        "TORCH_NCCL_DESYNC_DEBUG": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def reasons(folder: Path, part: str) -> list[str]:
    """Return why a part failed, from what the ranks have written to stderr since it began: first those that wait for no other."""
    found = []
    for path in folder.rglob("stderr.log"):  # in a folder for each rank, which torchrun makes
        lines = path.read_text(errors="replace").rpartition(heading(part))[2].splitlines()
        texts = [line.removeprefix("warning: ").strip() for line in lines if SHOWN.search(line)]
        found += [text if text.startswith("rank ") else f"rank {path.parent.name}: {text}" for text in texts]
    return sorted(found, key=lambda line: (bool(WAITING.search(line)), line))


def heading(part: str) -> str:
    """Return the line that every rank writes to stderr before a part."""
    return f"== {part} =="


def archive(folder: Path, path: Path) -> None:
    """Write the content of a folder, and what describes the machine, to an archive."""
    own = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(OWN) and not SECRET.search(name)]
    (folder / "environment.txt").write_text("\n".join(own), encoding="utf-8")
    (folder / "packages.txt").write_text("\n".join(sorted({f"{d.name} {d.version}" for d in distributions()})), encoding="utf-8")
    with open(folder / "machine.txt", "w") as file:
        subprocess.run(MACHINE, shell=True, stdout=file, stderr=file, timeout=60)  # a command that is missing says so
    with tarfile.open(path, "w:gz") as packed:
        packed.add(folder, path.name.partition(".")[0])
