"""Run the commands of README.md and docs/ with small sizes: ``python -m tests.commands [PAGE ...]``.

The commands of each page run in their order, in a new folder. Trainings get one epoch of a few synthetic images at a quarter of the
width, benchmarks one round. Commands that need programs other than Python are listed and skipped.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from launch.cli import take_processes

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(page for folder in ("docs", "reproduction") for page in sorted((ROOT / folder).glob("*.md"))),
]
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:petra|python|torchrun|pytest|make|docker|git|pip) [\w.-]")
TRAINS = ("launch.train", "launch.node", "launch.sweep", "benchmarks.nodes")
SMALL = (
    *("data=synthetic", "data.images=32", "data.batch_size=4", "model.width=0.25"),
    *("trainer.epochs=1", "trainer.limit_batches=2", "trainer.device=cpu"),
)

SMALL_TEXT = (f"data.root={ROOT / 'README.md'}", "trainer.limit_batches=2", "trainer.device=cpu")


def inline(text: str) -> list[str]:
    """Return all `code` outside of fenced blocks, each on one line."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def commands(path: Path) -> Iterator[str]:
    """Yield the commands of a page, in blocks and in sentences, without comments. Continued lines are joined."""
    text = path.read_text(encoding="utf-8")
    for language, block in FENCE.findall(text):
        if language == "sh":
            lines = block.replace("\\\n", " ").splitlines()
            yield from (line for line in (re.split(r"\s+# ", line)[0].strip() for line in lines) if line)
    yield from (code for code in inline(text) if COMMAND.match(code) and "…" not in code)


def split(command: str) -> list[str]:
    """Return the words of a command, with ``petra COMMAND`` as the module that it runs in a checkout."""
    words = shlex.split(command)
    start = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    if words[start] != "petra" or len(words) < start + 2 or words[start + 1].startswith("-") or words[start + 1] == "completion":
        return words
    name, *rest = words[start + 1 :]
    processes, rest = take_processes(rest)
    if processes is None:
        return [*words[:start], "python", "-m", f"launch.{name}", *rest]
    if name == "train":
        return [*words[:start], "python", "-m", "launch.train", "--nproc", str(processes), *rest]
    return [*words[:start], "torchrun", "--nproc-per-node", str(processes), "-m", f"launch.{name}", *rest]


def small(command: str) -> list[str] | None:
    """Return the words of a command with small sizes, or None for a command that isn't Python or takes long."""
    words = split(command.replace("-per-node N", "-per-node 2").replace("--nproc N", "--nproc 2"))
    start = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    if start or words[0] not in ("python", "torchrun") or "--slurm" in words:
        return None
    words[:1] = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "torch.distributed.run"]
    modules = [word for previous, word in pairwise(words) if previous == "-m"]
    if modules and modules[-1].startswith(("tests.", "stress")):
        return None
    if modules and modules[-1] in TRAINS:
        return [
            *(word for word in words if not word.startswith("data")),
            *(SMALL_TEXT if "experiment=text_short" in words else SMALL),
        ]
    if modules and modules[-1].startswith("benchmarks."):
        return [*words, "--rounds", "1"]
    # launch.compare is named without runs. Reproductions would train for hours; tests/reproduction runs small ones.
    return [*words, "--help"] if words[-1] == "launch.compare" or "reproduction" in modules else words


def main() -> None:
    """Run the commands and print how each ended. Exit with status 1 if one failed."""
    pages = [Path(name).resolve() for name in sys.argv[1:]] or PAGES
    failed = []
    for path in pages:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "examples").symlink_to(ROOT / "examples")
            (Path(folder) / "docs" / "figures").mkdir(parents=True)
            for command in commands(path):
                words = small(command)
                if words is None:
                    print(f"skipped    {path.name}: {command}", flush=True)
                    continue
                environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
                done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
                print(f"{'FAILED' if done.returncode else 'ran':10} {path.name}: {command}", flush=True)
                if done.returncode:
                    failed.append(command)
                    print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
