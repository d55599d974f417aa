"""Train short runs at another commit and in this work tree, and compare their final weights bit for bit.

``python -m tests.golden --against COMMIT [--folder DIR] [--only NAME ...]``

Every method, transport, remedy and optimizer appears in at least one run, as do several values of k, replicas and resumed runs.
Runs are float32 on the CPU unless their name says otherwise. Both trees must run on the same machine: bits differ between
processors. With ``--folder`` the weights of COMMIT are kept there and trained only once.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parent.parent
IMAGES = ("data=synthetic", "data.images=128", "data.batch_size=8", "data.size=16", "data.classes=4", "model.width=0.125")
TOKENS = ("data=text", "data.batch_size=4", "data.size=16", "model=revgpt", "model.dim=16", "model.heads=2", "model.depth=2")
COMMON = (
    *("trainer.device=cpu", "trainer.channels_last=false", "trainer.epochs=2", "trainer.limit_batches=13", "optim.lr=1.0"),
    *("schedule.warmup_epochs=1", "schedule.milestones=null", "trainer.export=pt", "checkpoint.keep=0", "trainer.drift=null"),
)
"""Thirteen microbatches an epoch: no k divides them, so updates go on from one epoch to the next."""
TIMEOUT = 540


class Run(NamedTuple):
    """One training run; several lists of words are starts one after another in the same folder."""

    name: str
    processes: int
    starts: tuple[tuple[str, ...], ...]


def _run(name: str, words: str = "", processes: int = 1, data: Sequence[str] = IMAGES) -> Run:
    return Run(name, processes, ((*data, *COMMON, *words.split()),))


def _resumed(name: str, words: str, processes: int = 1) -> Run:
    """One epoch, then the second in another start."""
    common = (*IMAGES, *COMMON, *words.split(), "checkpoint.keep=1", "resume=auto")
    return Run(name, processes, ((*common, "trainer.epochs=1"), common))


METHODS = ("petra", "backprop", "reversible", "delayed", "dsp", "reconstruct_stashed", "pipedream", "1f1b", "gpipe")
REMEDIES = ("discount", "pipemare", "prediction", "compensation", "compensation_prediction", "lookahead", "shrinking")
RUNS = (
    *(_run(f"{method}", f"method={method} k=2") for method in METHODS),
    _run("pipedream_2bw", "method=pipedream_2bw k=4 trainer.stages=4"),
    *(_run(f"{remedy}", f"remedy={remedy} k=2") for remedy in REMEDIES),
    _run("k1", "k=1"),
    _run("k3_d1", "k=3 method.delay=1"),
    _run("mixed_keeps", "k=2 trainer.stages=3 method.delay=[1,2] method.keep=input"),
    _run("delayed_graph", "method=delayed method.keep=graph k=3 trainer.stages=4"),
    _run("adamw_prediction", "optim=adamw optim.lr=0.01 remedy=prediction k=2"),
    _run("lars_ema", "optim=lars optim.ema=0.9 k=2"),
    _run("clip", "optim.clip=0.1 k=2 trainer.nonfinite=skip"),
    _run("clip_globally", "optim.clip=0.1 optim.clip_scope=global method=1f1b k=4"),
    _run("bf16", "trainer.precision=bf16 k=2"),
    _run("fp16", "trainer.precision=fp16 k=2 trainer.limit_batches=3"),
    _run("exact_streams", "trainer.exact_streams=true k=2"),
    _run("wire_bf16", "trainer.wire=bf16 k=2"),
    _run("channels_last", "trainer.channels_last=true model.width=0.25 k=2"),
    _run("concurrency", "trainer.concurrency=2 k=2"),
    _run("muon_gpt", "optim=muon optim.lr=0.05 model.dropout=0.1 k=2", data=TOKENS),
    _run("vit_dropout", "model=revvit model.width=null model.dim=16 model.heads=2 model.depth=2 model.dropout=0.1 k=2"),
    _resumed("resumed", "k=3 remedy=pipemare optim.ema=0.9"),
    _resumed("resumed_stashed", "method=delayed k=4"),
    _run("lockstep", "k=2", 3),
    _run("edge", "k=2 trainer.transport=edge", 3),
    _run("wire_bf16_3", "k=2 trainer.wire=bf16", 3),
    _run("d1_3", "k=3 method.delay=1", 3),
    _run("1f1b_lockstep", "method=1f1b k=4 trainer.transport=lockstep optim.clip=0.1 optim.clip_scope=global", 3),
    _run("gpipe_edge", "method=gpipe k=4", 3),
    _resumed("resumed_3", "k=3 remedy=prediction", 3),
    _run("dp2", "dp=2 k=2", 4),
    _run("dp2_backprop", "dp=2 k=2 method=backprop optim.clip=0.1 optim.clip_scope=global", 4),
    _run("dp2_pipedream", "dp=2 k=3 method=pipedream", 4),
)


def main() -> None:
    """Entry point: exit status 1 if any run's weights differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, metavar="COMMIT", help="the commit whose weights are the reference")
    parser.add_argument("--folder", type=Path, help="where to keep the reference; a temporary folder by default")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these runs only")
    options = parser.parse_args()
    runs = [run for run in RUNS if not options.only or run.name in options.only]
    found = subprocess.run(["git", "rev-parse", options.against], cwd=ROOT, check=True, capture_output=True, text=True)
    commit = found.stdout.strip()
    with tempfile.TemporaryDirectory() as temporary:
        kept = (options.folder or Path(temporary)) / commit
        missing = [run for run in runs if not (kept / run.name / "model.pt").exists()]
        if missing:
            tree = Path(temporary) / "tree"
            checkout(commit, tree)
            train(missing, tree, kept)
        train(runs, ROOT, Path(temporary) / "new")
        differing = [run.name for run in runs if not same(kept / run.name, Path(temporary) / "new" / run.name)]
    print(f"{len(runs) - len(differing)} of {len(runs)} runs equal bit for bit to {commit[:7]}", *differing, sep="\n  differs: ")
    sys.exit(bool(differing))


def checkout(commit: str, folder: Path) -> None:
    """Write the files of a commit into a new folder."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def train(runs: Sequence[Run], tree: Path, folder: Path) -> None:
    """Train the runs with the code in ``tree``, each into ``folder/<name>``; one start of torchrun for each number of processes.

    Raises:
        SystemExit: If a run fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_bytes(bytes(i * i % 251 for i in range(4096)))
    groups = defaultdict[int, list[list[str]]](list)
    for run in runs:
        place = [f"run_dir={folder / run.name}", *([f"data.root={text}"] if "data=text" in run.starts[0] else [])]
        groups[run.processes] += [[*words, *place] for words in run.starts]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    for processes, starts in groups.items():
        begun = time.monotonic()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += [__file__, json.dumps(starts)]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            sys.exit(f"{tree}: a run with {processes} process(es) failed:\n{done.stdout[-500:]}\n{done.stderr[:3000]}")
        print(f"{tree}: {len(starts)} starts with {processes} process(es), {time.monotonic() - begun:.0f} s", flush=True)


def same(reference: Path, found: Path) -> bool:
    """Whether two run folders hold the same exported tensors, bit for bit."""
    names = sorted(path.name for path in reference.glob("*.pt"))
    return bool(names) and all(_bits(reference / name) == _bits(found / name) for name in names)


def _bits(path: Path) -> dict[str, bytes]:
    state = torch.load(path, map_location="cpu", weights_only=True)
    return {key: value.contiguous().numpy().tobytes() for key, value in state.items()}


def _worker(starts: Sequence[Sequence[str]]) -> None:
    """What each process does: all starts one after another."""
    from launch.train import main as start

    torch.set_num_interop_threads(1)
    torch.set_num_interop_threads = lambda threads: None  # torch accepts one call per process
    for words in starts:
        sys.argv = ["launch.train", *words]
        start()


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _worker(json.loads(sys.argv[1]))
    else:
        main()
