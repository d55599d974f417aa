"""Train short runs at another commit and in this work tree, and compare their final weights, losses and metrics bit for bit.

``python -m tests.golden --against COMMIT [--folder DIR] [--only NAME ...]``

Every method, transport, remedy and optimizer appears in at least one run, as do several values of k, replicas, resumed runs and
most families of models. Runs are float32 on the CPU unless their name says otherwise. Both trees must run on the same machine: bits
differ between processors. With ``--folder`` the runs of COMMIT are kept there and trained only once.

Each tree trains its own :data:`RUNS`, in the words that its configuration has. Runs are compared by their names, so a run keeps its
name when a key is renamed. COMMIT has the option ``--train``; for an older one, use the file ``tests/golden.py`` that it has.
"""

import argparse
import hashlib
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

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent
IMAGES = ("data=synthetic", "data.images=128", "data.batch_size=8", "data.size=16", "data.classes=4", "model.width=0.125")
_GPT = ("data.batch_size=4", "data.size=16", "model.dim=16", "model.heads=2", "model.depth=2")
TEXT = ("data=text", "model=revgpt", *_GPT, "data.root=FILES/text.txt")
MODERN = "model.mlp=swiglu model.norm=rmsnorm model.positions=rotary model.kv_heads=1 model.qk_norm=true"
TOKENS = ("data=tokens", "model=revgpt", *_GPT, "data.root=FILES/tokens", "data.classes=64")
SEGMENTATION = (
    *("data=segmentation", "data.root=FILES/segmentation", "data.batch_size=2", "data.size=16", "data.classes=3"),
    *("data.workers=0", "model=deeplabv3", "model.width=0.0625"),
)
FEW = "trainer.limit_batches=5"
VIT = "model._target_=examples.vision_transformer.revvit"
COMMON = (
    *("trainer.device=cpu", "trainer.channels_last=false", "trainer.epochs=2", "trainer.limit_batches=13", "optim.lr=1.0"),
    *("schedule.warmup_epochs=1", "schedule.milestones=null", "trainer.export=pt", "checkpoint.keep=0"),
)
"""Thirteen microbatches an epoch: no k divides them, so updates go on from one epoch to the next."""
LINKS = {
    "devices": [{"count": 3}],
    "links": [{way: {"bandwidth": 1000, "latency": latency} for way in ("forward", "backward")} for latency in (0, 1e7)],
}
"""Stated links for ``method.delay=auto``: of no latency, and of ten seconds, beside which no measured time of a block matters."""
TIMEOUT = 7200


class Run(NamedTuple):
    """One training run; several lists of words are starts one after another in the same folder.

    FILES in a word is the folder of :func:`write_files`. Replicas of an elastic run are started by ``petra train --nproc``.
    """

    name: str
    processes: int
    starts: tuple[tuple[str, ...], ...]
    elastic: bool = False


def _run(name: str, words: str = "", processes: int = 1, data: Sequence[str] = IMAGES) -> Run:
    return Run(name, processes, ((*data, *COMMON, *words.split()),))


def _resumed(name: str, words: str, processes: int = 1) -> Run:
    """One epoch, then the second in another start. The warm-up is as long as the first start, which prints a warning."""
    common = (*IMAGES, *COMMON, *words.split(), "checkpoint.keep=1", "resume=auto")
    return Run(name, processes, ((*common, "trainer.epochs=1"), common))


def _elastic(name: str, words: str, processes: int) -> Run:
    common = (*IMAGES, *COMMON, *words.split(), "cluster.elastic=true", "resume=auto", "checkpoint.every=6")
    return Run(name, processes, (common,), elastic=True)


METHODS = ("petra", "backprop", "reversible", "delayed", "dsp", "reconstruct_stashed", "pipedream", "1f1b", "gpipe")
REMEDIES = {
    **{name: f"remedy={name}" for name in ("discount", "pipemare", "prediction")},
    "compensation": "remedy._target_=examples.remedies.compensation.SpikeCompensation",
    "lookahead": "remedy._target_=examples.remedies.lookahead.Lookahead",
    "shrinking": "remedy._target_=examples.remedies.shrinking.GradientShrinking",
}
RUNS = (
    *(_run(method, f"method={method} k=2") for method in METHODS),
    _run("pipedream_2bw", "method=pipedream_2bw k=4 trainer.stages=4"),
    *(_run(name, f"{words} k=2") for name, words in REMEDIES.items()),
    _run("prediction_difference", "remedy=prediction_difference k=2 trainer.stages=4"),
    _run("braking", "remedy._target_=examples.remedies.braking.Braking k=2 trainer.stages=4"),
    _run("dc_asgd", "remedy._target_=examples.remedies.dc_asgd.DelayCompensation method=delayed k=2 trainer.stages=4"),
    _run("paci", "method=paci k=3 trainer.stages=4"),
    _run("k1", "k=1"),
    _run("k3_d1", "k=3 method.delay=1"),
    _run("mixed_keeps", "k=2 trainer.stages=3 method.delay=[1,2] method.keep=input"),
    _run("delayed_graph", "method=delayed method.keep=graph k=3 trainer.stages=4"),
    _run("adamw_prediction", "optim=adamw optim.lr=0.01 remedy=prediction k=2"),
    _run("ema", "optim.average=0.9 k=2"),
    _run("clip", "optim.clip=0.1 k=2 optim.nonfinite=skip"),
    _run("clip_globally", "optim.clip=0.1 optim.clip_globally=true method=1f1b k=4"),
    _run("bf16", "trainer.precision=bf16 k=2"),
    _run("fp16", "trainer.precision=fp16 k=2 trainer.limit_batches=3"),
    _run("exact_streams", "trainer.exact_streams=true k=2"),
    _run("wire_bf16", "trainer.message_format=bf16 k=2"),
    _run("channels_last", "trainer.channels_last=true model.width=0.25 k=2"),
    _run("muon_gpt", "optim=muon optim.lr=0.05 model.dropout=0.1 k=2", data=TEXT),
    _run("muon_feedback", "optim=muon optim.lr=0.05 remedy=feedback method=pipedream_2bw k=4 trainer.stages=4", data=TEXT),
    _run("nadam", "optim=nadam optim.lr=0.01 method=pipedream k=2", data=TEXT),
    _run(
        "basis_rotation",
        "optim=adamw optim._target_=petra.training.optim.basis_rotation optim.lr=0.01 optim.frequency=2 k=2",
        data=TEXT,
    ),
    _run("compile", "trainer.compile=aot_eager k=2 model.depth=1", data=TEXT),
    _run("tokens", "k=2 optim=adamw optim.lr=0.01", data=TOKENS),
    _run("gpt", f"model=gpt {MODERN}", data=TEXT),
    _run("documents", "model.delimiter=7 k=2", data=TEXT),
    _run("vit_dropout", f"{VIT} model.dim=16 model.heads=2 model.depth=2 model.dropout=0.1 k=2", data=IMAGES[:-1]),
    _run("revnet38", "model=revnet38 k=2 trainer.stages=4 trainer.limit_batches=5"),
    _run("inplace_abn", f"model=wide_resnet38 model.norm=inplace_abn model.width=0.0625 k=2 trainer.stages=4 {FEW}"),
    _run("deeplab", "model.body=revnet18 k=2 trainer.bootstrap=0.5 trainer.stages=3 schedule=polynomial", data=SEGMENTATION),
    _run(
        "deeplab_uniform",
        "model.body=resnext101 model.cardinality=2 model.width=0.25 method=1f1b k=2 data.sampling=class_uniform trainer.stages=2",
        data=SEGMENTATION,
    ),
    _resumed("resumed", "k=3 remedy=pipemare optim.average=0.9"),
    _resumed("resumed_stashed", "method=delayed k=4"),
    _run("lockstep", "k=2", 3),
    _run("edge", "k=2 trainer.transport=edge", 3),
    _run("wire_bf16_3", "k=2 trainer.message_format=bf16", 3),
    _run("d1_3", "k=3 method.delay=1", 3),
    _run("1f1b_lockstep", "method=1f1b k=4 trainer.transport=lockstep optim.clip=0.1 optim.clip_globally=true", 3),
    _run("gpipe_edge", "method=gpipe k=4", 3),
    _run("petra_fresh", "method=petra_fresh k=2 trainer.stages=3 cluster.machines=FILES/machines.json", 3),
    _resumed("resumed_3", "k=3 remedy=prediction", 3),
    _run("dp2", "dp=2 k=2", 4),
    _run("dp2_backprop", "dp=2 k=2 method=backprop optim.clip=0.1 optim.clip_globally=true", 4),
    _run("dp2_pipedream", "dp=2 k=3 method=pipedream", 4),
    _run("inplace_abn_sync", f"dp=2 k=2 model.body=resnet18 model.norm=inplace_abn_sync trainer.stages=2 {FEW}", 4, SEGMENTATION),
    _elastic("elastic", "dp=2 k=2 trainer.limit_batches=7", 2),
)


def main() -> None:
    """Entry point: exit status 1 if any run's weights, losses or metrics differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--against", metavar="COMMIT", help="the commit whose weights are the reference")
    asked.add_argument("--train", type=Path, metavar="DIR", help="only train, into this folder, with the data in --files")
    parser.add_argument("--files", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where to keep the reference; a temporary folder by default")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these runs only")
    options = parser.parse_args()
    if options.train:
        return train([run for run in RUNS if run.name in options.only], options.train, options.files)
    if unknown := set(options.only or ()) - {run.name for run in RUNS}:
        parser.error(f"--only: expected names of runs, got {', '.join(sorted(unknown))}")
    runs = [run for run in RUNS if not options.only or run.name in options.only]
    parsed = subprocess.run(["git", "rev-parse", options.against], cwd=ROOT, check=True, capture_output=True, text=True)
    commit, begun = parsed.stdout.strip(), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        files, trained = Path(temporary) / "files", Path(temporary) / "new"
        write_files(files)
        data = hashlib.md5(b"".join(path.read_bytes() for path in sorted(files.rglob("*.*")))).hexdigest()
        kept = (options.folder or Path(temporary)) / f"{commit}-{data[:8]}"  # weights trained on other files are no reference
        missing = [run for run in runs if not (kept / run.name / "model.pt").exists()]
        if missing:
            tree = Path(temporary) / "tree"
            checkout(commit, tree)
            names = [run.name for run in missing]
            print(_python(tree, [f"{tree}/tests/golden.py", "--train", str(kept), "--files", str(files), "--only", *names]), end="")
        train(runs, trained, files)
        outcomes = {run.name: outcome(kept / run.name, trained / run.name) for run in runs}
    equal = [name for name, found in outcomes.items() if found == "equal"]
    minutes = (time.monotonic() - begun) / 60
    print(f"{len(equal)} of {len(runs)} runs equal bit for bit to {commit[:7]}, {minutes:.1f} min")
    for name, found in outcomes.items():
        if found != "equal":
            print(f"  {found}: {name}")
    sys.exit(any(found.startswith("differs") for found in outcomes.values()))


def checkout(commit: str, folder: Path) -> None:
    """Write the files of a commit into a new folder."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def write_files(folder: Path) -> None:
    """Write the data of the runs: a text, tokens in llm.c's format, images with labels, and the description of two links."""
    for part in ("tokens", "segmentation"):
        (folder / part).mkdir(parents=True)
    (folder / "text.txt").write_bytes(bytes(i * i % 251 or 251 for i in range(4096)))
    for name, count in (("train", 4096), ("val", 512)):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, count
        tokens = (np.arange(count) ** 2 % 61).astype("<u2")
        (folder / "tokens" / f"{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    pixels = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for i in range(count):
            for kind, array in (("images", pixels.integers(0, 256, (24, 32, 3))), ("labels", pixels.integers(0, 3, (24, 32)))):
                path = folder / "segmentation" / kind / split / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array.astype(np.uint8)).save(path)
    (folder / "machines.json").write_text(json.dumps(LINKS))


def train(runs: Sequence[Run], folder: Path, files: Path) -> None:
    """Train the runs with the code of this tree, each into ``folder/<name>``; one start of torchrun for each number of processes.

    Raises:
        SystemExit: If a run fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups = defaultdict[tuple[int, bool], list[list[str]]](list)
    for run in runs:
        for words in run.starts:
            placed = [*(word.replace("FILES", str(files)) for word in words), f"run_dir={folder / run.name}"]
            groups[run.processes, run.elastic].append(placed)
    for (processes, elastic), starts in groups.items():
        begun = time.monotonic()
        if elastic:
            for start in starts:
                _python(ROOT, ["-m", "petra", "train", "--nproc", str(processes), *start])
        else:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            _python(ROOT, [*torchrun, __file__, json.dumps(starts)])
        print(f"{ROOT}: {len(starts)} starts with {processes} process(es), {time.monotonic() - begun:.0f} s", flush=True)


def _python(tree: Path, arguments: Sequence[str]) -> str:
    """Run Python with the code in ``tree`` and return what it prints.

    Raises:
        SystemExit: If it fails.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        last = [line for line in done.stdout.splitlines() if line.startswith("run: ")][-1:]
        sys.exit("\n".join([f"{tree} failed", *last, done.stderr[:3000]]))
    return done.stdout


def outcome(reference: Path, found: Path) -> str:
    """Return whether two runs are ``equal`` or what ``differs``, or ``gone`` or ``new`` if one tree lacks the run."""
    names = [sorted(path.name for path in folder.glob("*.pt")) for folder in (reference, found)]
    if not all(names):
        return "gone" if names[0] else "new" if names[1] else "in neither tree"
    if names[0] != names[1] or any(_bits(reference / name) != _bits(found / name) for name in names[0]):
        return "differs"
    lines = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (reference, found)]
    same = len(lines[0]) == len(lines[1]) and all(map(_same_numbers, *lines))
    return "equal" if same else "differs in metrics.jsonl"


def _same_numbers(before: dict[str, object], now: dict[str, object]) -> bool:
    """Return whether the losses and metrics of an epoch that both trees report are the same, or both NaN."""
    return all(repr(before[key]) == repr(now[key]) for key in before.keys() & now.keys() if "second" not in key)


def _bits(path: Path) -> dict[str, bytes]:
    import torch

    state = torch.load(path, map_location="cpu", weights_only=True)
    return {key: value.contiguous().numpy().tobytes() for key, value in state.items()}


def _worker(starts: Sequence[Sequence[str]]) -> None:
    """What each process does: all starts one after another. Curves are not drawn: that would take a third of the time."""
    import torch
    from matplotlib.figure import Figure

    from launch.train import main as start

    Figure.savefig = lambda figure, file, **options: file.write("<svg/>") if isinstance(file, io.StringIO) else None
    torch.set_num_interop_threads(1)
    torch.set_num_interop_threads = lambda nthreads: None  # torch accepts one call per process
    for words in starts:
        print(f"run: {words[-1]}", flush=True)
        sys.argv = ["launch.train", *words]
        start()


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _worker(json.loads(sys.argv[1]))
    else:
        main()
