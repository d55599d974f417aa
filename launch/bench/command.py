"""Measure the speed of PETRA, torch's 1F1B and DDP on the GPUs of this machine: ``petra bench gpu``.

RevNet-50 at 224² and a reversible GPT with 354 million parameters, eager and compiled, in bf16, on one device and on all: every
contestant trains the same blocks with the same samples per update, at the microbatch size that is fastest for it. Contestants
alternate. The page bench.html and the figures bench.json are written to the folder --out. Without GPUs, small networks are trained
by processes on the CPU, whose figures say nothing about GPUs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from petra.errors import require

from ..doctor.machine import inspect_machine
from ..runtime.agent import ONE_MACHINE
from ..runtime.machine import LOOPBACK
from ..runtime.rank import Process
from ..runtime.terminal import command, parser_for, path_argument
from .measure import ALONE, CONTESTANTS, TINY, WORKS, Measurement
from .page import as_table, write_page

ROUNDS = 5
LIMIT, LIMIT_COMPILED = 240, 900
"""Seconds that a measurement may take, with the start of the processes."""
Entry = dict[str, Any]
"""What was measured of a contestant: samples per second by samples per microbatch in the search (``sizes``), the best size
(``batch``), samples per second in each round (``rounds``), what :func:`launch.bench.measure.details` returns, and the ``error``."""


class Failed(Exception):
    """A measurement that failed, with the reason in one line."""


class Workers:
    """Processes that measure, one for each device. They start when they are needed, and again after a failure."""

    def __init__(self, processes: int) -> None:
        self._processes, self._number = processes, 0
        self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._agent: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (as long as this object)

    def measure(self, trial: Measurement) -> dict[str, Any]:
        """Return what :func:`launch.bench.measure.measure` returns.

        Raises:
            Failed: If a process fails, or there is no result in time.
        """
        limit, key = LIMIT if trial.compile is None else LIMIT_COMPILED, f"result {self._number}"
        agent = self._agent = self._agent or self._start(limit)
        self._store.set(f"trial {self._number}", json.dumps(asdict(trial)))
        self._number += 1
        end = time.monotonic() + limit
        while not self._store.check([key]) and agent.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        late = f"no result within {limit} s" if agent.poll() is None else self._last_error()
        found: dict[str, Any] = json.loads(self._store.get(key)) if self._store.check([key]) else {"error": late}
        if "error" in found:
            self.stop()
            raise Failed(found["error"])
        return found

    def _start(self, limit: int) -> subprocess.Popen[bytes]:
        agent = [sys.executable, "-m", "torch.distributed.run", *ONE_MACHINE, "--nproc-per-node", str(self._processes)]
        worker = ["-m", f"{__package__}.measure", str(self._store.port), str(self._number), str(limit)]
        self._output.truncate(0)
        return subprocess.Popen([*agent, *worker], stdout=self._output, stderr=self._output)

    def stop(self) -> None:
        """End the processes, if they run. torchrun ends its own."""
        if self._agent is not None:
            self._agent.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._agent.wait(40)
            self._agent.kill()
        self._agent = None

    def _last_error(self) -> str:
        self._output.seek(0)
        lines = [line for line in self._output.read().decode(errors="replace").splitlines() if "rror" in line]
        return (lines or ["the processes ended without an error message"])[0].strip()


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all contestants, write page and figures, and print a table. Exit with status 1 if nothing was measured."""
    parser = parser_for(__doc__)
    parser.add_argument("what", choices=["gpu"], help="what to measure")
    parser.add_argument(
        "--out", type=path_argument, default=Path("runs/bench"), help="folder of the page and the figures (runs/bench)"
    )
    parser.add_argument("--minutes", type=float, default=40.0, help="time limit; what does not fit is left out and named")
    parser.add_argument("--devices", type=int, help="GPUs, or processes on a machine without GPUs; by default all, or 2")
    parser.add_argument("--only", nargs="*", metavar="TEXT", help="only contestants with this text in their printed names")
    parser.add_argument("--tiny", action="store_true", help="small networks, as on a machine without GPUs")
    given = parser.parse_args(arguments)
    require(given.minutes > 0, "--minutes", "a number > 0", given.minutes)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = gpus or 2 if given.devices is None else given.devices
    require(1 <= devices <= (gpus or devices), "--devices", f"a number from 1 to {gpus}" if gpus else "a number >= 1", devices)
    chosen = list(cases(given.tiny or not gpus, devices, given.only or [""]))
    require(bool(chosen), "--only", f"a text in a name such as {next(iter(WORKS))}, eager: PETRA", " ".join(given.only or []))
    machine = asdict(inspect_machine(Process(0, 1, 0, 1), torch.device("cuda", 0) if gpus else torch.device("cpu")))
    found: dict[str, Any] = {"gpus": gpus, "devices": devices, "tiny": chosen[0][1].tiny, "machine": machine, "cases": {}}
    if not gpus:
        print("no GPU: small networks on the CPU, whose figures say nothing about GPUs", flush=True)
    end, workers = time.monotonic() + 60 * given.minutes, Workers(devices)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        for i, (name, trial, contestants) in enumerate(chosen):
            now = time.monotonic()
            found["cases"][name] = compare(workers, name, trial, contestants, now + (end - now) / (len(chosen) - i))
            (given.out / "bench.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
            write_page(found, given.out / "bench.html")
    finally:
        workers.stop()
    print(f"\n{as_table(found)}\npage: {given.out / 'bench.html'}")
    if not any(entry["rounds"] for case in found["cases"].values() for entry in case.values()):
        sys.exit(1)


def cases(tiny: bool, devices: int, only: Sequence[str]) -> Iterator[tuple[str, Measurement, list[str]]]:
    """Yield each case with its name, its measurement without contestant, and its contestants."""
    possible = [name for name in CONTESTANTS if devices > 1 or name in (ALONE, "PETRA")]
    for kind, compiler in {"eager": None, "compiled": "aot_eager" if tiny else "inductor"}.items():
        for work in WORKS:
            name = f"{work}, {kind}"
            if contestants := [each for each in possible if any(text in f"{name}: {each}" for text in only)]:
                yield name, Measurement(work, "", 1, 1 if tiny else 3, compiler, tiny), contestants


def compare(workers: Workers, case: str, trial: Measurement, contestants: Sequence[str], end: float) -> dict[str, Entry]:
    """Find the best microbatch size of each contestant in half of the time, then measure all in turn, round by round."""
    half = (time.monotonic() + end) / 2
    entries: dict[str, Entry] = {name: {"sizes": {}, "rounds": [], "error": None} for name in contestants}

    def tried(phase: str, name: str, **options: Any) -> dict[str, Any] | None:
        """Measure, unless the contestant has failed or no time is left."""
        entry, one = entries[name], replace(trial, contestant=name, **options)
        late = time.monotonic() > (half if phase == "search" else end)
        if late and not entry["sizes" if phase == "search" else "rounds"]:
            entry["error"] = entry["error"] or "left out: no time"
        if late or entry["error"] is not None:
            return None
        try:
            found = workers.measure(one)
        except Failed as failure:
            result = f"failed: {failure}"
            if phase != "search" or not entry["sizes"]:  # smaller microbatches may do
                entry["error"] = str(failure)
        else:
            result = f"{found['round_us']:.0f} µs" if one.host else f"{found['samples_per_second']:.4g} samples/s"
        print(f"{case}: {name}, {phase}, {one.batch} per microbatch: {result}", flush=True)
        return None if result.startswith("failed") else found

    for name, entry in entries.items():
        for batch in (TINY if trial.tiny else WORKS)[trial.work].sizes:
            if (measured := tried("search", name, batch=batch)) is None:
                break
            entry["sizes"][batch] = measured["samples_per_second"]
        entry["batch"] = max(entry["sizes"], key=entry["sizes"].__getitem__, default=0)
    for number in range(2 if trial.tiny else ROUNDS):
        for name, entry in entries.items():
            options = {"batch": entry["batch"], "updates": 2 * trial.updates, "details": number == 0}
            if (measured := tried(f"round {number + 1}", name, **options)) is not None:
                entry["rounds"].append(measured.pop("samples_per_second"))
                entry.update(measured if number == 0 else {})
    for name, entry in entries.items():
        if (measured := tried("host", name, host=True)) is not None:
            entry["host_us"] = measured["round_us"]
    return entries
