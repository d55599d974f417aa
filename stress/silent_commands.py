"""Try commands and environments whose result could silently be another one than what is meant.

Each of :data:`TRIES` starts ``petra`` in an empty folder, and has what it must lead to, which follows from the documentation of
Hydra, the shell, Python or a launcher, or from a plain run. Prints a line for each, and how many were silent: exit status 0, no
warning, and another result. Exits with status 1 if one is not as expected.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from stress.frame import PATIENCE, run_tries
from tests.support.processes import environment

RUN = (
    *("data=synthetic", "data.images=64", "data.batch_size=8", "data.size=16", "model.width=0.0625", "k=2", "trainer.epochs=1"),
    *("schedule.warmup_epochs=0", "trainer.limit_batches=4", "trainer.device=cpu", "trainer.export=pt"),
)
HASH = "hash of the exported weights"


@dataclass(frozen=True)
class Ended:
    """How a command ended, in its working directory."""

    folder: Path
    status: int
    text: str

    @property
    def refused(self) -> bool:
        """Whether it ended with status 2 and one line that begins with ``error: ``."""
        return self.status == 2 and len([line for line in self.text.splitlines() if line.startswith("error: ")]) == 1

    @property
    def runs(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.rglob("summary.json"))

    def value(self, key: str) -> Any:
        """Return the value of a key in the configuration of the only run."""
        (run,) = self.runs
        return OmegaConf.select(OmegaConf.load(run / "config.yaml"), key)

    @property
    def weights(self) -> str:
        """Return a hash of the exported weights of the only run."""
        (run,) = self.runs
        state = torch.load(run / "model.pt", weights_only=True)
        return hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()


@dataclass(frozen=True)
class Try:
    """A command.

    Attributes:
        area: ``command line`` or ``environment``.
        expected: What must happen, in words.
        holds: Whether it has happened.
        words: The command after ``petra``.
        variables: Environment variables; None removes one.
        before: What the shell does before, in the working directory.
    """

    area: str
    expected: str
    holds: Callable[[Ended], bool]
    words: tuple[str, ...] = ("train", *RUN, "run_dir=run")
    variables: dict[str, str] = field(default_factory=dict)
    before: str = ":"


def plain() -> str:
    """Return the hash of the weights of the plain run."""
    if HASH not in _known:
        _known[HASH] = start(Try("", "", lambda end: True)).weights
    return _known[HASH]


_known: dict[str, str] = {}
LINE, SHELL = "command line", "environment"
TRAIN = ("train", *RUN)
FILE = "mkdir -p c/experiment; printf '# @package _global_\\ntrainer:\\n  epoch: 3\\n' > c/experiment/mine.yaml"
TRIES = {
    "a time in run_dir, which each process resolves": Try(
        LINE,
        "one folder for both processes, since a run has one folder",
        lambda end: len(end.runs) == 1 and len([*end.folder.glob("r_*")]) == 1,
        ("train", "--nproc", "2", *RUN, "run_dir=r_${now:%S-%f}"),
    ),
    "an empty run_dir": Try(LINE, "refused: the working directory is no new folder", lambda end: end.refused, (*TRAIN, "run_dir=")),
    "a key twice": Try(LINE, "the last counts (documentation)", lambda end: end.value("k") == 1, (*TRAIN, "run_dir=run", "k=1")),
    "an integer as 1e3": Try(
        LINE,
        "1000, or refused",
        lambda end: end.refused or end.value("seed") == 1000,
        (*TRAIN, "run_dir=run", "seed=1e3"),
    ),
    "a learning rate of nan": Try(LINE, "refused", lambda end: end.refused, (*TRAIN, "run_dir=run", "optim.lr=nan")),
    "an unknown key in a file of one's own": Try(
        LINE,
        "refused",
        lambda end: end.refused and "trainer.epochs" in end.text,
        ("train", "--config-dir", "c", "experiment=mine", *RUN),
        before=FILE,
    ),
    "--nproc twice": Try(
        LINE,
        "the last counts, as in argparse, or refused",
        lambda end: end.refused or "in 3 process(es)" in end.text,
        ("train", "--nproc", "2", "--nproc", "3", *RUN, "run_dir=run"),
    ),
    "a sweep over range(1,3)": Try(
        LINE,
        "runs with seed 1 and 2 (Hydra's documentation)",
        lambda end: [OmegaConf.load(run / "config.yaml")["seed"] for run in end.runs] == [1, 2],
        ("train", "--multirun", *RUN, "seed=range(1,3)"),
    ),
    "a key that exists with a plus": Try(
        LINE,
        "set, or refused",
        lambda end: end.refused or end.value("data.images") == 32,
        (*TRAIN, "run_dir=run", "+data.images=32"),
    ),
    "a key deleted with a tilde": Try(
        LINE,
        "the default of the signature, 0, or refused",
        lambda end: end.refused or end.value("optim.momentum") == 0,
        (*TRAIN, "run_dir=run", "~optim.momentum", "optim.nesterov=false"),
    ),
    "an evaluation of one batch": Try(
        LINE,
        "the JSON object says that it has 8 images",
        lambda end: json.loads(next(line for line in end.text.splitlines() if line.startswith("{")))["images"] == 8,
        ("evaluate", "run", "trainer.limit_batches=1"),
        before=f"{sys.executable} -m petra {' '.join((*TRAIN, 'run_dir=run'))} > log",
    ),
    "a number of threads that is none": Try(
        SHELL,
        "the weights of one thread, or refused",
        lambda end: end.refused or end.weights == plain(),
        variables={"OMP_NUM_THREADS": "abc"},
    ),
    "another seed of Python's hashes": Try(
        SHELL, "the same weights", lambda end: end.weights == plain(), variables={"PYTHONHASHSEED": "123"}
    ),
    "assertions switched off": Try(
        SHELL, "the same weights", lambda end: end.weights == plain(), variables={"PYTHONOPTIMIZE": "1"}
    ),
    "a GPU that is not there": Try(
        SHELL,
        "refused",
        lambda end: end.refused,
        (*TRAIN, "run_dir=run", "trainer.device=cuda"),
        {"CUDA_VISIBLE_DEVICES": "99"},
    ),
    "a folder for temporary files that is not there": Try(
        SHELL,
        "works, as tempfile falls back, or refused",
        lambda end: end.refused or len(end.runs) == 1,
        ("train", "--nproc", "2", *RUN, "run_dir=run"),
        {"TMPDIR": "/nonexistent"},
    ),
    "a terminal without UTF-8": Try(
        SHELL,
        "a folder with the bytes of the argument, or refused",
        lambda end: end.refused or (end.folder / "ä").is_dir(),
        (*TRAIN, "run_dir=ä"),
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ),
    "a working directory that was deleted": Try(
        SHELL,
        "one line, and no traceback",
        lambda end: end.status != 0 and "Traceback" not in end.text,
        (*TRAIN, "run_dir=run"),
        before="mkdir gone; cd gone; rmdir ../gone",
    ),
    "a pod of two, without petra node": Try(
        SHELL,
        "refused: each pod would train a run of its own",
        lambda end: end.refused,
        variables={"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"},
    ),
    "WORLD_SIZE without the rest": Try(SHELL, "refused", lambda end: end.refused, variables={"WORLD_SIZE": "2"}),
}
"""Twenty kinds of commands and environments, by name."""


def start(each: Try) -> Ended:
    """Run a command in an empty folder."""
    folder = Path(tempfile.mkdtemp())
    command = f'{each.before}\nexec "$0" -m petra "$@"'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, *each.words],
        cwd=folder,
        env=environment(**each.variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=PATIENCE,
    )
    return Ended(folder, done.returncode, done.stdout)


def judge(each: Try) -> tuple[str, str]:
    """Return how a try ended, and what it was to do if it is not right. A command that doesn't end in time is not silent."""
    try:
        end = start(each)
    except subprocess.TimeoutExpired:
        return "TOO SLOW", f"more than {PATIENCE} s"
    try:
        held = each.holds(end)
    except (ValueError, LookupError, OSError, StopIteration):  # no run, several runs, no output
        held = False
    quiet, last = end.status == 0 and "warning" not in end.text, "\n".join(end.text.splitlines()[-5:])
    details = "" if held else f"status {end.status}; expected: {each.expected}\n{last}"
    return "right" if held else "SILENT" if quiet else "OTHER", details


if __name__ == "__main__":
    run_tries(__doc__, {name: (each.area, partial(judge, each)) for name, each in TRIES.items()})
