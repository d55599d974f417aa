"""The emulation catches planted faults of programs for GPUs. In the original code, test_training.py finds nothing wrong.

Each fault replaces a function of petra or torch. Faults of other kinds: ``stress.faults``.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from petra.engine.endpoints import LossPort
from petra.engine.options.replicas import AllReduces
from petra.engine.options.staging import Staging
from petra.engine.worker import Worker
from tests.emulated import runs
from tests.emulated.device import Options
from tests.emulated.processes import run, start
from tests.emulated.test_training import SETTINGS, excess


def replace(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a function that replaces a member of a class or module by ``change`` of it."""
    return lambda: setattr(owner, name, change(getattr(owner, name)))


def unwaited(operation: Any) -> Any:
    """Return an operation whose handles don't wait."""
    return lambda *arguments, **named: SimpleNamespace(work=operation(*arguments, **named), wait=lambda: None)


def late_and_reversed() -> None:
    """The second replica starts its all-reduces at the end, and in the reverse order."""
    start_one, finish, late = AllReduces.start, AllReduces.finish, list[torch.Tensor]()

    def start_late(self: AllReduces, tensor: torch.Tensor) -> None:
        late.insert(0, tensor) if dist.get_rank(self._group) else start_one(self, tensor)

    def finish_late(self: AllReduces) -> float:
        for tensor in late:
            start_one(self, tensor)
        late.clear()
        return finish(self)

    AllReduces.start, AllReduces.finish = start_late, finish_late  # type: ignore[method-assign]


def on_the_host(start_run: Any) -> Any:
    def started(self: Any, data: Any, *arguments: Any, **named: Any) -> None:
        start_run(self, data, *arguments, **named)
        self._read = data.targets

    return started


def asking(backward: Any) -> Any:
    def asked(self: Worker, m: int) -> None:
        bool(next(self.stage.module.parameters()).sum())
        backward(self, m)

    return asked


EDGE = {"transport": "edge"}
REPLICAS = {"arguments": {"dp": 2, "stages": 2}}
MUTANTS: dict[str, tuple[Callable[[], None], int, dict[str, Any]]] = {
    "missing stream wait": (replace(dist, "irecv", unwaited), 3, EDGE),
    "buffer reused early": (replace(dist, "isend", unwaited), 3, EDGE),
    "collective in another order": (late_and_reversed, 4, REPLICAS),
    "device mix": (replace(LossPort, "start", on_the_host), 1, {}),
    "hidden synchronization": (replace(Worker, "backward", asking), 1, {}),
    "pageable copy": (replace(Staging, "_pin", lambda pin: lambda self, m: self._read(m)), 1, {}),
}
"""Faults, with the number of processes and the settings of the run that must fail."""
BROKEN = ("LookupError", "AttributeError", "NameError", "TypeError", "SyntaxError", "ImportError")
"""Errors of a mutant that no longer fits the code, rather than of the emulation."""


def train_rank(rank: int, name: str, settings: dict[str, Any]) -> runs.Outcome:
    """Train a mutant in one of several processes."""
    MUTANTS[name][0]()
    return runs.train_rank(rank, runs.Case(microbatches=12, **settings))


def train_alone(name: str, settings: dict[str, Any]) -> dict[str, int]:
    """Train a mutant in one process; return the unlisted synchronizations."""
    MUTANTS[name][0]()
    case = runs.Case(microbatches=40, **SETTINGS["fp16"])
    return excess(runs.synchronizations(0, case), case)


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_caught(name: str) -> None:
    """By an error, other bits, or a synchronization of the host, with one of five seeds of the delays.

    They are long, since a busy host reuses a buffer late.
    """
    _, world, settings = MUTANTS[name]
    expected = run(runs.train_cpu_rank, runs.Case(microbatches=12, **settings), world=world) if world > 1 else []
    for seed in range(1, 6):
        options = Options(seed=seed, delay_rate=0.2, delay_us=5000) if world > 1 else Options(seed=seed)
        target = train_rank if world > 1 else train_alone
        ended = start(target, name, settings, world=world, options=options, group_timeout=5, timeout=60)
        text = "\n".join(ended.outputs)
        assert not any(error in text for error in BROKEN), text
        if ended.statuses != [0] * world:
            return
        if any(map(runs.Outcome.difference, ended.results, expected)) if world > 1 else ended.results != [{}]:
            return
    pytest.fail("no seed shows the fault")
