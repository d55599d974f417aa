"""The emulation catches planted faults of programs for GPUs, and finds nothing wrong in the original code.

Each fault replaces a function of petra or torch. Faults of other kinds: ``stress.faults``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from petra.engine.endpoints import LossPort
from petra.engine.options.replicas import AllReduces
from petra.engine.options.staging import Staging
from petra.engine.worker import Worker
from petra.transport.lockstep import LockstepPort
from tests.emulated import runs
from tests.emulated.device import Options
from tests.emulated.processes import Ended, core, run, start
from tests.emulated.test_training import SETTINGS, excess


class Unwaited:
    """A handle whose ``wait`` does nothing."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        """Return at once."""


def replace(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a function that replaces a member of a class or module by ``change`` of it."""
    return lambda: setattr(owner, name, change(getattr(owner, name)))


def unwaited(operation: Any) -> Any:
    return lambda *arguments, **named: Unwaited(operation(*arguments, **named))


def unwaited_port(add_posted: Any) -> Any:
    return lambda port, work, buffer: add_posted(port, Unwaited(work), buffer)


def one_group(new_group: Any) -> Any:
    groups: dict[tuple[int, ...], Any] = {}

    def made(ranks: list[int], **settings: Any) -> Any:
        if tuple(ranks) not in groups:
            groups[tuple(ranks)] = new_group(ranks, **settings)
        return groups[tuple(ranks)]

    return made


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


MUTANTS: dict[str, tuple[Callable[[], None], str]] = {
    "missing stream wait, lockstep": (replace(LockstepPort, "add_posted", unwaited_port), "lockstep"),
    "missing stream wait, edge": (replace(dist, "irecv", unwaited), "edge"),
    "buffer reused early": (replace(dist, "isend", unwaited), "edge"),
    "shared communicator": (replace(dist, "new_group", one_group), "edge"),
    "collective in another order": (late_and_reversed, "replicas"),
    "device mix": (replace(LossPort, "start", on_the_host), "alone"),
    "hidden synchronization": (replace(Worker, "backward", asking), "alone"),
    "pageable copy": (replace(Staging, "_pin", lambda pin: lambda self, m: self._read(m)), "alone"),
}
"""Faults, and the keys of :data:`SCENARIOS` that must fail."""


def train_rank(rank: int, name: str | None, settings: dict[str, Any]) -> Any:
    """Train a mutant in one of several processes; return the weights."""
    if name is not None:
        MUTANTS[name][0]()
    return runs.train_rank(rank, runs.Case(microbatches=12, **settings)).weights


def train_alone(name: str | None) -> dict[str, int]:
    """Train a mutant in one process; return the unlisted synchronizations."""
    if name is not None:
        MUTANTS[name][0]()
    case = runs.Case(microbatches=40, **SETTINGS["fp16"])
    return excess(runs.synchronizations(case), case)


def in_processes(world: int, **settings: Any) -> Callable[[str | None, int], str]:
    expected = functools.cache(lambda: run(runs.train_cpu_rank, runs.Case(microbatches=12, **settings), world=world))

    def scenario(name: str | None, seed: int) -> str:
        options = Options(seed=seed, delay_rate=0.2)
        ended = start(train_rank, name, settings, world=world, options=options, group_timeout=5, timeout=60)
        if ended.statuses != [0] * world:
            return summary(ended)
        pairs = [(f[key], e[key]) for f, e in zip(ended.results, (part.weights for part in expected()), strict=True) for key in e]
        wrong = sum(not found.equal(right) for found, right in pairs)
        return f"{wrong} of {len(pairs)} tensors have other bits" if wrong else ""

    return scenario


def alone(name: str | None, seed: int) -> str:
    ended = start(train_alone, name, options=Options(seed=seed))
    return summary(ended) if ended.statuses != [0] else f"host synchronizations: {ended.results[0]}" * bool(ended.results[0])


def summary(ended: Ended) -> str:
    lines = [line for text in ended.outputs for line in text.splitlines() if "Error" in line or "emulated NCCL" in line]
    return f"statuses {ended.statuses}: {lines[-1] if lines else ended.outputs}"


SCENARIOS: dict[str, Callable[[str | None, int], str]] = {
    "lockstep": in_processes(3, transport="lockstep"),
    "edge": in_processes(3, transport="edge"),
    "replicas": in_processes(4, arguments={"dp": 2, "stages": 2}),
    "alone": alone,
}
"""Runs by name. Each returns what is wrong with a mutant, or an empty string. Without a mutant it returns an empty string."""
BROKEN = ("LookupError", "AttributeError", "NameError", "TypeError", "SyntaxError", "ImportError")
"""Errors of a mutant that no longer fits the code, rather than of the emulation."""


def caught(name: str, seeds: int = 3) -> str:
    """Return how a mutant was caught by one of the first seeds, or an empty string.

    Raises:
        LookupError: If the mutant doesn't fit the code any more.
    """
    for seed in range(1, seeds + 1):
        if found := SCENARIOS[MUTANTS[name][1]](name, seed):
            if any(error in found for error in BROKEN):
                raise LookupError(found)
            return f"seed {seed}, {found}"
    return ""


@pytest.mark.parametrize("name", core(MUTANTS, {1, 4}))
def test_planted_faults_are_caught(name: str) -> None:
    assert caught(name)


@pytest.mark.parametrize("scenario", core(SCENARIOS, ()))
def test_the_original_code_passes(scenario: str) -> None:
    assert SCENARIOS[scenario](None, 1) == ""
