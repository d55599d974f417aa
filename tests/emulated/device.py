"""The emulated CUDA device: installs it into torch, and reports where the host would wait for a GPU.

:func:`install` must run before ``import torch``, because torch looks for CUDA when it is imported.
"""

import ctypes
import importlib.util
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from tests.emulated.build import MODULE, library


@dataclass(frozen=True)
class Options:
    """What the emulation adds to a plain execution.

    Attributes:
        devices: Number of devices.
        seed: Seed of the random delays of jobs; 0 for none.
        delay_rate: Share of jobs that are delayed.
        delay_us: Longest delay in microseconds. Each stream multiplies it by a pace between 0.1 and 5.
        lazy_loading: Whether the first launch of each kernel waits until its device is idle, as CUDA's lazy loading of modules may.
        one_slot: Whether a device runs one NCCL operation at a time. Operations of several communicators then need one order.
        patience_ms: Time after which a host that waits for the device reports a deadlock.
        fault: What happens at launch number ``fault_at`` of this process: ``die`` or ``hang``; empty for nothing.
        fault_microbatch: With a value >= 0, launches count for ``fault_at`` from the first backward pass of this microbatch on.
        fault_rank: Only the process whose RANK this is has the fault; -1 for any.
    """

    devices: int = 1
    seed: int = 0
    delay_rate: float = 0.02
    delay_us: int = 300
    lazy_loading: bool = False
    one_slot: bool = False
    patience_ms: int = 30_000
    fault: str = ""
    fault_at: int = 0
    fault_microbatch: int = -1
    fault_rank: int = -1


class Sync(NamedTuple):
    """A place where the host waits for the device.

    Attributes:
        kind: ``item`` (a value is read), ``copy`` (a blocking copy), ``sync`` (an operator whose output's size depends on values),
            or ``synchronize`` (a stream, an event, the device, or a barrier).
        what: Description of the copy, operator, or what is synchronized.
        place: File, line and function of the innermost call in the project.
    """

    kind: str
    what: str
    place: str


@dataclass
class Report:
    """Synchronizations so far, by place, and the number of times each happened."""

    syncs: Counter[Sync] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, what: str) -> None:
        sync = Sync(kind, what, _place())
        with self.lock:
            self.syncs[sync] += 1


report = Report()
extension: Any = None
"""The compiled module, after :func:`install`."""


def install(options: Options) -> None:
    """Make ``torch.cuda`` and the backend ``nccl`` of torch.distributed the emulated ones in this process.

    Raises:
        RuntimeError: If torch has been imported already, or if the emulation can't be built here.
    """
    global extension
    if "torch" in sys.modules:
        raise RuntimeError("install the emulated device before torch is imported")
    path = library()
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    configure(options)
    extension.on_sync(report.add)

    from tests.emulated import torch_cuda

    torch_cuda.install(extension, options.devices)


def configure(options: Options) -> None:
    """Change the options of this process. Delays follow the new seed if no stream has been used yet."""
    settings = extension.settings()
    for each in fields(options):
        if not each.name.startswith("fault"):
            setattr(settings, each.name, getattr(options, each.name))
    faulty = options.fault_rank in (-1, int(os.environ.get("RANK", "0")))
    settings.fault, settings.fault_at = options.fault if faulty else "", 0 if options.fault_microbatch >= 0 else options.fault_at
    if options.fault_microbatch >= 0:
        _delay_fault(options)


def _delay_fault(options: Options) -> None:
    """Count launches for the fault from the first backward pass of a microbatch on."""
    from petra.engine.worker import Worker

    backward = Worker.backward

    def counted(worker: Worker, m: int) -> None:
        if m == options.fault_microbatch:
            extension.settings().fault_at = extension.launches() + options.fault_at
            Worker.backward = backward  # type: ignore[method-assign]
        backward(worker, m)

    Worker.backward = counted  # type: ignore[method-assign]


@contextmanager
def watch_syncs() -> Iterator[Counter[Sync]]:
    """Collect the synchronizations inside the ``with`` block."""
    before = Counter(report.syncs)
    found: Counter[Sync] = Counter()
    yield found
    found.update(report.syncs - before)


def _place() -> str:
    """Return the innermost call outside of torch, the standard library and the emulation."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        parts = path.parts
        for room in ("petra", "launch", "tests", "benchmarks"):
            if room in parts[:-1] and "site-packages" not in parts and path.parent != Path(__file__).parent:
                start = len(parts) - 1 - parts[::-1].index(room, 1)
                return f"{'/'.join(parts[start:])}:{frame.f_lineno} {frame.f_code.co_name}"
        if path.name.startswith("test_"):
            return f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside the project" if threading.current_thread() is threading.main_thread() else "another thread"
