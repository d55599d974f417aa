"""Test the GPUs of this machine with petra, within ten minutes: ``petra selftest``.

The report has versions and links, the correctness of every method against the CPU, bit-repeatability, both transports with messages
above 64 MB, and throughput, memory beside its prediction and torch's profile of several models and methods. It is written to
selftest.md and selftest.json in the folder --out, both made to be pasted into an issue. On a machine without GPUs, tiny runs on the
CPU take its place.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from petra import METHODS
from petra.errors import first_line, require

from ..run.markdown import table
from ..runtime.terminal import command, parser_for

LARGEST_DIFFERENCE = 1e-3
"""Difference of weights from the CPU's, relative to the largest of each tensor, after three updates in float32."""
DOCTOR_SECONDS = 180
"""Time limit of the doctor."""
LARGE_MESSAGE = 64 * 10**6
"""Size in bytes above which NCCL certainly sends a message only when it is received. Tests of transports use larger ones."""
EXPLANATION = """
difference: of weights from the CPU's after three updates in float32, relative to the largest of each tensor; 1e-3 is accepted,
because rounding differs between devices. repeatable: two runs with the same seed are equal bit for bit. digest: of all weights,
equal for runs with the same d. Samples are images, or windows of tokens for revgpt. peak_bytes: the largest of all processes, of
torch's allocator on GPUs, resident on CPUs. predicted_bytes: as `dry_run=memory` predicts, without workspaces. selftest.json has
the options of each part, and on GPUs torch's profile. To report a problem, attach both files.
"""
LEFT_OUT = "left out: no time"
"""Result of a part that has not run."""


class Trial(NamedTuple):
    """A part of the test (:data:`launch.selftest.parts.PARTS`) with its options, in a number of processes."""

    part: str
    name: str
    options: dict[str, Any]
    processes: int = 1


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run all parts and write the report. Exit with status 1 if a part failed."""
    parser = parser_for(__doc__)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the report")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit; parts that don't fit are left out and named")
    parser.add_argument("--tiny", action="store_true", help="small models and few microbatches, as on a machine without GPUs")
    parser.add_argument("--only", nargs="*", metavar="TEXT", help="only parts with this text in their names")
    given = parser.parse_args(arguments)
    require(given.minutes > 0, "--minutes", "a number > 0", given.minutes)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tiny = given.tiny or not gpus
    end = time.monotonic() + 60 * given.minutes
    found: dict[str, Any] = {"gpus": gpus, "tiny": tiny, "doctor": _doctor(max(gpus, 1)), "parts": []}
    print(found["doctor"], flush=True)
    for run in (run for run in plan(gpus, tiny) if not given.only or any(text in run.name for text in given.only)):
        left, started = end - time.monotonic(), time.monotonic()
        result = run_part(run, min(left, 180)) if left > 5 else {"result": LEFT_OUT}
        part = {"part": run.part, "name": run.name, "options": run.options, "processes": run.processes, **result}
        found["parts"].append(part | {"duration": round(time.monotonic() - started, 1)})
        print(f"{run.name}: {part['result']}", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "selftest.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (given.out / "selftest.md").write_text(markdown(found), encoding="utf-8")
    print(f"report: {given.out / 'selftest.md'}")
    if any(part["result"].startswith("failed") for part in found["parts"]):
        sys.exit(1)


def plan(gpus: int, tiny: bool) -> Iterator[Trial]:
    """Yield the parts, most valuable first."""
    device = {"device": "cuda" if gpus else "cpu"}
    small = {"model": "revnet18", **({"width": 0.125, "size": 16, "batch": 4} if tiny else {"width": 0.5, "batch": 16})}
    for method in METHODS:
        k = 20 if method in ("pipedream_2bw", "paci") else 2
        yield Trial("compare", f"{method} against the CPU", {**small, **device, "method": method, "k": k})
    several, counts = min(gpus, 8) if gpus else 2, {"k": 4, "microbatches": 8 if tiny else 40}
    if several > 1:
        large = small if tiny else {"model": "revnet18", "batch": 256}  # 268 MB backward
        for transport, delay in (("lockstep", 2), ("lockstep", 1), ("edge", 1), ("edge", 2)):
            options = {**large, **device, "method": "petra", "delay": delay, "transport": transport, "k": 2, "microbatches": 24}
            options |= {} if tiny else {"least_bytes": LARGE_MESSAGE}
            yield Trial("transport", f"{transport}, d = {delay}", options, several)
    sizes = [("revnet18", 4)] if tiny else [*product(("revnet18", "revnet50", "revgpt"), (64, 256))]
    for name, variant in {"": {}, ", compiled": {"compile": "inductor"}}.items():  # plain ones first: compiling takes long
        for (model, batch), method in product(sizes, ("petra", "reversible", "backprop", "1f1b")):
            fast = {} if tiny else {"precision": "bf16", "channels_last": model != "revgpt"}
            options = {**(small if tiny else {}), **device, **fast, **variant, "model": model, "batch": batch, "method": method}
            if not (tiny and variant):
                yield Trial("speed", f"{model}, batch {batch}, {method}{name}", options | counts, several)


def run_part(run: Trial, seconds: float) -> dict[str, Any]:
    """Run a part in processes of its own. Return its ``result``, and its ``findings`` if it has ended."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        options = json.dumps({"timeout": min(seconds, 60), **run.options})
        done = start_processes(f"{__package__}.parts", [run.part, options, str(out)], run.processes, seconds)
        if done.returncode or not out.exists():
            return {"result": f"failed: {_reason(done.stderr)}"}
        findings = json.loads(out.read_text(encoding="utf-8"))
    return {"result": judge(findings, run.options), "findings": findings}


def start_processes(module: str, arguments: Sequence[str], processes: int, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a module in new processes, with torchrun if there are several. Past the time limit, end them and report that."""
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *agent, "-m", module, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"did not end within {seconds:.0f} s")


def judge(found: dict[str, Any], options: dict[str, Any]) -> str:
    """Return the result of a part with these options: ``passed``, or why its findings are a failure."""
    if not found.get("difference", 0.0) <= LARGEST_DIFFERENCE:
        return f"failed: weights differ from the CPU's by {found['difference']:.1e}"
    if not found.get("repeatable", True):
        return "failed: two runs with the same seed differ"
    if (size := found.get("message_bytes", 0)) < (least := options.get("least_bytes", 0)):
        return f"failed: messages have {size / 1e6:.1f} MB, fewer than {least / 1e6:.0f}"
    return "passed"


def _doctor(processes: int) -> str:
    """Return the report of ``launch.doctor`` for all GPUs."""
    done = start_processes(f"{(__package__ or '').rpartition('.')[0]}.doctor", [], processes, DOCTOR_SECONDS)
    return done.stdout.strip() or f"petra doctor: {_reason(done.stderr)}"


def _reason(text: str) -> str:
    """Return the first line of an error report, or the last line of any other text."""
    lines = [line for line in text.splitlines() if line.strip()] or ["no output"]
    return next((line for line in lines if line.startswith("error:")), first_line(RuntimeError(lines[-1])))


def markdown(found: dict[str, Any]) -> str:
    """Return the report."""
    kind = f"{found['gpus']} GPU(s)" if found["gpus"] else "no GPU"
    results = [part["result"] for part in found["parts"]]
    rows = [[part["name"], str(part["processes"]), part["result"], _text(part.get("findings", {}))] for part in found["parts"]]
    return (
        f"# Self-test of petra: {kind}{', tiny runs' if found['tiny'] else ''}\n\n"
        f"{results.count('passed')} of {len(results)} parts passed, for {results.count(LEFT_OUT)} no time was left, in "
        f"{sum(part['duration'] for part in found['parts']):.0f} s.\n{EXPLANATION}\n## Machine\n\n{found['doctor']}\n\n"
        f"## Parts\n\n{table(('part', 'processes', 'result', 'findings'), rows, aligned=True)}"
    )


def _text(findings: dict[str, Any]) -> str:
    """Return findings for a cell of the table, which has no place for a profile."""
    named = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in findings.items() if name != "profile"}
    return ", ".join(f"{name} {value}" for name, value in named.items())


if __name__ == "__main__":
    main()
