"""Test the GPUs of this machine with petra, within ten minutes: ``petra selftest``.

The report has versions and links, the correctness of every method against the CPU, bit-repeatability, both transports with messages
above 64 MB, memory against its prediction, and throughput, memory, kernels and launches of several models and methods. It is
written to selftest.md and selftest.json in the folder --out, both made to be pasted into an issue. On a machine without GPUs, tiny
runs on the CPU take its place.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from petra import METHODS
from petra.errors import first_line, invalid

from ..run.markdown import aligned_table
from ..runtime.terminal import parser_for
from .parts import PARTS

LARGEST_DIFFERENCE = 1e-3
"""Difference of weights from the CPU's, relative to the largest of each tensor, after three updates in float32."""
DOCTOR_SECONDS = 180
"""Time limit of the doctor."""
LARGE_MESSAGE = 64 * 10**6
"""Size in bytes above which NCCL certainly sends a message only when it is received. Tests of transports use larger ones."""
VARIANTS: dict[str, dict[str, Any]] = {"": {}, ", compiled": {"compile": "inductor"}}
"""Options of the runs that measure speed, by the end of their names."""


class Trial(NamedTuple):
    """A part of the test (:data:`launch.selftest.parts.PARTS`) with its options, in a number of processes."""

    part: str
    name: str
    options: dict[str, Any]
    processes: int = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all parts and write the report. Exit with status 1 if a part failed."""
    parser = parser_for(__doc__)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the report")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit; parts that don't fit are left out and named")
    parser.add_argument("--tiny", action="store_true", help="small models and few microbatches, as on a machine without GPUs")
    parser.add_argument("--only", nargs="*", metavar="TEXT", help="only parts with this text in their names")
    given = parser.parse_args(arguments)
    if not given.minutes > 0:
        parser.error(str(invalid("--minutes", "a number > 0", given.minutes)))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tiny = given.tiny or not gpus
    end = time.monotonic() + 60 * given.minutes
    found: dict[str, Any] = {"gpus": gpus, "tiny": tiny, "doctor": _doctor(max(gpus, 1)), "parts": []}
    print(found["doctor"], flush=True)
    for run in (run for run in plan(gpus, tiny) if not given.only or any(text in run.name for text in given.only)):
        left, started = end - time.monotonic(), time.monotonic()
        result = run_part(run, min(left, 180)) if left > 5 else {"left_out": "no time left"}
        found["parts"].append({"part": run.part, "name": run.name, **run.options, "processes": run.processes, **result})
        found["parts"][-1]["duration"] = round(time.monotonic() - started, 1)
        print(f"{run.name}: {_result(found['parts'][-1])}", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "selftest.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (given.out / "selftest.md").write_text(markdown(found), encoding="utf-8")
    print(f"report: {given.out / 'selftest.md'}")
    if any("failed" in part for part in found["parts"]):
        sys.exit(1)


def plan(gpus: int, tiny: bool) -> Iterator[Trial]:
    """Yield the parts, most valuable first."""
    device = {"device": "cuda" if gpus else "cpu"}
    small = (
        {"model": "revnet18", "width": 0.125, "size": 16, "batch": 4} if tiny else {"model": "revnet18", "width": 0.5, "batch": 16}
    )
    for method in METHODS:
        k = 20 if method == "pipedream_2bw" else 2
        yield Trial("compare", f"{method} against the CPU", {**small, **device, "method": method, "k": k})
    several = min(gpus, 8) if gpus else 2
    if several > 1:
        large = small if tiny else {"model": "revnet18", "batch": 256}  # 268 MB backward
        for transport, delay in (("lockstep", 2), ("lockstep", 1), ("edge", 1), ("edge", 2)):
            options = {**large, **device, "method": "petra", "delay": delay, "transport": transport, "k": 2, "microbatches": 24}
            yield Trial("transport", f"{transport}, d = {delay}", options, several)
    for method in ("petra", "pipedream", "backprop"):
        yield Trial("memory", f"memory of {method}", {**small, **device, "method": method, "k": 2, "stages": 4})
    yield from _speeds({**(small if tiny else {}), **device}, tiny, several)


def _speeds(common: dict[str, Any], tiny: bool, processes: int) -> Iterator[Trial]:
    """Yield the parts that measure speed: plain ones first, since compilation takes much of the time."""
    for variant, chosen in VARIANTS.items():
        for model in ("revnet18",) if tiny else ("revnet18", "revnet50", "revgpt"):
            for batch in (4,) if tiny else (64, 256):
                for method in ("petra", "reversible", "backprop", "1f1b"):
                    options = {**common, **chosen, "model": model, "batch": batch, "method": method, "k": 4}
                    fast = {} if tiny else {"precision": "bf16", "channels_last": model != "revgpt"}
                    counts = {"microbatches": 8 if tiny else 40}
                    if not (tiny and variant):
                        yield Trial("speed", f"{model}, batch {batch}, {method}{variant}", {**options, **fast, **counts}, processes)


def run_part(run: Trial, seconds: float) -> dict[str, Any]:
    """Run a part in processes of its own. Return its findings, or why it ``failed``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        options = json.dumps({"timeout": min(seconds, 60), **run.options})
        done = start_processes(f"{__package__}.parts", [run.part, options, str(out)], run.processes, seconds)
        if done.returncode or not out.exists():
            return {"failed": _reason(done.stderr)}
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return {**found, **judge(run.part, found, large="width" not in run.options)}


def start_processes(module: str, arguments: Sequence[str], processes: int, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a module in new processes, with torchrun if there are several. Past the time limit, end them and report that."""
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *agent, "-m", module, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"did not end within {seconds:.0f} s")


def judge(part: str, found: dict[str, Any], large: bool = False) -> dict[str, str]:
    """Return why the findings of a part are a failure; empty if they are not.

    Args:
        large: Whether messages must be larger than :data:`LARGE_MESSAGE`.
    """
    if part == "compare" and not found["difference"] <= LARGEST_DIFFERENCE:
        return {"failed": f"weights differ from the CPU's by {found['difference']:.1e}"}
    if not found.get("repeatable", True):
        return {"failed": "two runs with the same seed differ"}
    if part == "transport" and large and found["message_bytes"] <= LARGE_MESSAGE:
        return {"failed": f"messages have {found['message_bytes'] / 1e6:.1f} MB, not more than {LARGE_MESSAGE / 1e6:.0f}"}
    return {}


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
    parts = found["parts"]
    failed, left_out = ([part["name"] for part in parts if key in part] for key in ("failed", "left_out"))
    seconds = sum(part.get("duration", 0.0) for part in parts)
    lines = [
        f"# Self-test of petra: {kind}{', tiny runs' if found['tiny'] else ''}",
        "",
        f"{len(parts) - len(failed) - len(left_out)} of {len(parts)} parts passed, in {seconds:.0f} s.",
        *([f"Failed: {'; '.join(failed)}."] if failed else []),
        *([f"No time was left for: {'; '.join(left_out)}."] if left_out else []),
        "",
        "To report a problem, attach this file and selftest.json, which has the options of each part.",
        "",
        f"## Machine\n\n{found['doctor']}\n",
    ]
    for name, part in PARTS.items():
        entries = [entry for entry in parts if entry["part"] == name]
        if entries:
            titles = [key.replace("_bytes", " (MB)").replace("_", " ") for key in part.columns]
            rows = [[entry["name"], *(_cell(key, entry.get(key)) for key in part.columns), _result(entry)] for entry in entries]
            lines += [f"## {part.title}\n\n{part.explanation}\n\n{aligned_table(('run', *titles, 'result'), rows)}\n"]
    return "\n".join(lines)


def _cell(key: str, value: Any) -> str:
    """Return a finding as text, empty if there is none. Of a list, the largest counts."""
    if isinstance(value, list):
        value = max(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is not None and key.endswith("_bytes"):
        return f"{value / 1e6:.1f}"
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _result(entry: dict[str, Any]) -> str:
    return f"failed: {entry['failed']}" if "failed" in entry else "left out" if "left_out" in entry else "passed"


if __name__ == "__main__":
    main()
