"""Test the GPUs of this machine with petra: ``petra selftest``, in three minutes on two GPUs.

First torch.distributed alone, so that a broken cluster is told from a broken petra. Then lockstep and replicas, whose weights must
equal those of one process bit for bit, checkpoints, blocks against plain operations, and training against the CPU, also in bf16 and
compiled. ``--full`` adds all methods, large messages over both transports, and speed and memory of several models.

A report is written to selftest.md and selftest.json in the folder --out, and if a part fails, selftest.tar.gz: what all ranks
printed, dumps of NCCL, topology, versions and environment. Without a GPU it ends with an error, unless ``--tiny`` asks for small
runs on the CPU.

``petra node --module launch.selftest`` on each of several machines runs the parts for all processes over them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import distributions
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

import torch

from petra.distributed import all_gather_objects
from petra.errors import alternatives, require

from ..doctor.machine import PREFIXES, missing_gpu
from ..runtime.agent import ONE_MACHINE, this_process
from ..runtime.rank import DUMPS
from ..runtime.terminal import command, parser_for, path_argument, table
from .parts import PARTS
from .plan import Trial, judge, plan

EXPLANATION = """
difference: largest one of weights from the CPU's after three updates, or of outputs and gradients from those of plain operations,
relative to the largest of each tensor; 1e-3 is accepted, and 5e-2 in bf16, because rounding differs between devices. repeatable:
two runs with the same seed are equal bit for bit. digest: of all weights, equal for runs with the same d. training_loss: mean over
the run, of weights that change. seconds_per_new_microbatch: of a new pipeline, with its first checks, filling and draining.
samples_per_second: without its first checks, of images, or windows of tokens for revgpt. largest_message_bytes: backward.
peak_bytes: the largest of all processes, of torch's allocator on GPUs, resident on CPUs. predicted_tensor_bytes: as
`dry_run=memory` predicts, without workspaces.
selftest.json has the options of each part. To report a problem, attach all files.
"""
LEFT_OUT = "left out: no time"
"""Result of a part that has not run."""
STARTING, EACH, COMPILING = 120, 60, 600
"""Seconds in which processes must start, for each part, and for the messages of a part that is compiled."""
RESULTS = "results.jsonl"
"""What the first rank has found, a line for each part."""
SHOWN = re.compile(r"s without progress, |Watchdog caught collective|^error: |^[\w.]*Error: |NCCL WARN|CUDA error")
"""Lines of a rank's output that tell why a part failed."""
WAITING = re.compile(r"waits in petra/(engine/(checks|options/rounds)|transport/(lockstep|edge))|Watchdog caught")
"""Lines of a rank that waits for its GPU or another rank."""
OWN = (*PREFIXES, "CUDA_", "SLURM_", "PET_", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Beginnings of the names of environment variables in the archive; none of a name with one of :data:`SECRET`."""
SECRET = re.compile("TOKEN|SECRET|PASS|KEY|CRED|AUTH", re.IGNORECASE)
MACHINE = "nvidia-smi; nvidia-smi topo -m; ibstat; uname -a; df -h /dev/shm"
"""Commands that describe the machine."""
Results = dict[str, dict[str, Any]]
"""By the name of a part: ``result`` after a failure, otherwise ``findings``; and ``duration`` in seconds."""


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts and write the report. Exit with status 1 if a part failed."""
    parser = parser_for(__doc__)
    parser.add_argument("--out", type=path_argument, default=Path("runs/selftest"), help="folder of the report (runs/selftest)")
    parts_of = parser.add_mutually_exclusive_group()
    parts_of.add_argument("--quick", action="store_true", help="only the parts of three minutes (the default)")
    parts_of.add_argument("--full", action="store_true", help="all parts")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit; parts that don't fit are left out and named")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a process waits for another")
    parser.add_argument("--tiny", action="store_true", help="small models and few microbatches; also without a GPU")
    parser.add_argument("--only", nargs="*", metavar="TEXT", help="only parts with this text in their names")
    parser.add_argument("--trials", type=Path, help="file with the parts to run in these processes")
    given = parser.parse_args(arguments)
    for name in ("minutes", "timeout"):
        require(getattr(given, name) > 0, f"--{name}", "a number > 0", getattr(given, name))
    if given.trials is not None:
        run_here([Trial(*row) for row in json.loads(given.trials.read_text())], given.timeout, given.trials.parent)
        return
    world, gpus = int(os.environ.get("WORLD_SIZE", "0")), torch.cuda.device_count() if torch.cuda.is_available() else 0
    first = os.environ.get("RANK", "0") == "0"
    if not gpus:
        require_asked_for(given.tiny)
        print(*[f"no GPU ({missing_gpu()}): tiny runs on the CPU, which say nothing about GPUs"] * first, sep="", flush=True)
    planned = plan(world or gpus, bool(gpus), given.tiny, given.full)
    trials = [trial for trial in planned if trial.processes == world or not world]
    names = alternatives(trial.name for trial in trials)
    trials = [t for t in trials if not given.only or any(text in t.name for text in given.only)]
    require(bool(trials), "--only", f"a text in {names}", " ".join(given.only or []))
    trials = [t._replace(options={"patience": given.timeout / 3, **t.options}) for t in trials]
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="petra-selftest") as folder:
        if world:
            report, end = partial(write_report, trials, gpus, given.tiny, given.out), time.monotonic() + 60 * given.minutes
            results = run_here(trials, given.timeout, given.out, report, end)
        else:
            results = run_all(trials, given.timeout, time.monotonic() + 60 * given.minutes, Path(folder))
        if not first:
            return
        parts = write_report(trials, gpus, given.tiny, given.out, results)
        rows = [(part["name"], str(part["processes"]), f"{part['duration']:.0f}", part["result"]) for part in parts]
        print(table(("part", "processes", "seconds", "result"), rows, aligned=True))
        print(f"report: {given.out / 'selftest.md'}", flush=True)
        if not any(part["result"].startswith("passed") for part in parts):
            print("no part passed", flush=True)
            sys.exit(1)
        if any(part["result"].startswith("failed") for part in parts):
            for name in ("selftest.json", "selftest.md"):
                shutil.copy(given.out / name, folder)
            archive(Path(folder), given.out / "selftest.tar.gz")
            print(f"to report a problem, send {given.out / 'selftest.tar.gz'}", flush=True)
            sys.exit(1)


def require_asked_for(tiny: bool) -> None:
    """Raise a ConfigError, which the processes of a machine print once, unless runs on the CPU are asked for."""
    with this_process():
        require(tiny, "no GPU", "one, or --tiny for small runs on the CPU", missing_gpu())


def run_all(trials: Sequence[Trial], timeout: float, end: float, folder: Path) -> Results:
    """Run the parts, those with as many processes in one start, and after a failure the others in another start.

    Args:
        timeout: Seconds that a process waits for another.
        end: When to stop, in seconds of the monotonic clock.
        folder: Folder for what the processes write.
    """
    results: Results = {}
    for (processes, compiled), group in groupby(trials, lambda trial: (trial.processes, "compile" in trial.options)):
        left = [*group]
        while left:
            seconds = min(end - time.monotonic(), STARTING + len(left) * (timeout + (COMPILING if compiled else EACH)))
            if seconds < 5:
                break
            own = folder / f"start_{len([*folder.iterdir()]) + 1}"
            own.mkdir()
            (own / "trials.json").write_text(json.dumps(left), encoding="utf-8")
            wait = max(timeout, COMPILING) if compiled else timeout
            arguments = ["--trials", str(own / "trials.json"), "--timeout", str(wait)]
            started, ended = time.monotonic(), start_processes(arguments, processes, seconds, own)
            written = (own / RESULTS).read_text(encoding="utf-8").splitlines() if (own / RESULTS).exists() else []
            found = {row.pop("name"): row for row in map(json.loads, written)}
            results |= found
            if ended is None:
                break
            failed = left[min(len(found), len(left) - 1)]
            lines = reasons(own, failed.name)
            spent = time.monotonic() - started - sum(part["duration"] for part in found.values())
            results[failed.name] = {"result": f"failed: {(lines or [ended])[0]}", "evidence": lines, "duration": round(spent, 1)}
            print(f"{failed.name}: {results[failed.name]['result']}", flush=True)
            left = left[len(found) + 1 :]
    return results


def start_processes(arguments: Sequence[str], processes: int, seconds: float, folder: Path) -> str | None:
    """Run this command in new processes with torchrun, which writes their output to the folder. Return why they failed, or None."""
    agent = ["-m", "torch.distributed.run", *ONE_MACHINE, "--nproc-per-node", str(processes)]
    command = [sys.executable, *agent, "--redirects", "3", "--log-dir", str(folder), "-m", "petra", "selftest", *arguments]
    with open(folder / "torchrun.log", "w") as log:
        agent_process = subprocess.Popen(command, stdout=log, stderr=log, env={**variables(folder), **os.environ})
        try:
            status = agent_process.wait(seconds)
        except subprocess.TimeoutExpired:
            agent_process.terminate()  # it ends its processes
            agent_process.wait()
            return f"did not end within {seconds:.0f} s"
    return f"ended with status {status}" if status else None


def run_here(
    trials: Sequence[Trial],
    timeout: float,
    folder: Path,
    report: Callable[[Results], object] = lambda results: None,
    end: float = inf,
) -> Results:
    """Run parts one after the other in this process and the others of its group.

    The first process writes and returns the findings. Before each part it calls ``report``, in case that this one never ends. No
    part begins after ``end``, in seconds of its monotonic clock.
    """
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True  # as in training by default
    results: Results = {}
    with this_process() as process:
        device = process.device(trials[0].options["device"] if trials else "auto")
        with process.process_group(device, timeout):
            for trial in trials:
                if all_gather_objects(time.monotonic() > end)[0]:
                    break
                print(heading(trial.name), file=sys.stderr, flush=True)
                started, saved = time.monotonic(), folder / "checkpoints" / trial.name
                if process.first:
                    report(results | {trial.name: {"result": "failed: did not end", "duration": 0.0}})
                findings = PARTS[trial.part]({"folder": str(saved), "timeout": timeout, **trial.options}, device, process)
                results[trial.name] = {"findings": findings, "duration": round(time.monotonic() - started, 1)}
                if process.first:
                    with open(folder / RESULTS, "a", encoding="utf-8") as file:
                        file.write(json.dumps({"name": trial.name, **results[trial.name]}) + "\n")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return results


def write_report(trials: Sequence[Trial], gpus: int, tiny: bool, out: Path, results: Results) -> list[dict[str, Any]]:
    """Judge the findings and write the report. Return what it says of each part."""
    findings, parts = {name: row["findings"] for name, row in results.items() if "findings" in row}, []
    for trial in trials:
        row = results.get(trial.name, {"result": LEFT_OUT, "duration": 0.0})
        row = {"result": judge(trial, row.get("findings", {}), findings), **row}
        parts.append({"part": trial.part, "name": trial.name, "processes": trial.processes, "options": trial.options, **row})
    content = {"gpus": gpus, "tiny": tiny, "parts": parts}
    (out / "selftest.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    (out / "selftest.md").write_text(markdown(content), encoding="utf-8")
    return parts


def markdown(found: dict[str, Any]) -> str:
    """Return the report."""
    kind, parts = f"{found['gpus']} GPU(s)" if found["gpus"] else "no GPU", found["parts"]
    results = [part["result"] for part in parts]
    passed = sum(result.startswith("passed") for result in results)
    rows = [[part["name"], str(part["processes"]), part["result"], _text(part.get("findings", {}))] for part in parts]
    machine = "".join(part["findings"]["report"] for part in parts if "report" in part.get("findings", {}))
    evidence = [
        f"### {part['name']}\n\n" + "\n".join(f"    {line}" for line in part["evidence"]) for part in parts if part.get("evidence")
    ]
    return (
        f"# Self-test of petra: {kind}{', tiny runs' if found['tiny'] else ''}\n\n"
        f"{passed} of {len(results)} parts passed, for {results.count(LEFT_OUT)} no time was left, in "
        f"{sum(part['duration'] for part in parts):.0f} s.\n{EXPLANATION}\n## Machine\n\n{machine}\n\n"
        f"## Parts\n\n{table(('part', 'processes', 'result', 'findings'), rows, aligned=True)}\n" + "\n\n".join(evidence)
    )


def _text(findings: dict[str, Any]) -> str:
    """Return findings for a cell of the table."""
    named = {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in findings.items() if name != "report"}
    return ", ".join(f"{name} {value}" for name, value in named.items())


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
