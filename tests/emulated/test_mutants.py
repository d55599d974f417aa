"""The emulation catches planted faults of programs for GPUs, and finds nothing wrong in the original code.

Each fault replaces a function of petra or torch. Weights do not depend on random delays. Faults of other kinds: ``stress.faults``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petra.engine.endpoints import LossPort
from petra.engine.options.replicas import AllReduces
from petra.engine.options.staging import Staging
from petra.engine.worker import Worker
from petra.transport.lockstep import LockstepPort
from tests.emulated import device, runs
from tests.emulated.device import Options
from tests.emulated.processes import Ended, core, run, start
from tests.emulated.runs import Case
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


class Mutant(NamedTuple):
    """A fault: the function that plants it, and the key of :data:`SCENARIOS` that must fail."""

    plant: Callable[[], None]
    scenario: str


MUTANTS = {
    "missing stream wait, lockstep": Mutant(replace(LockstepPort, "add_posted", unwaited_port), "lockstep"),
    "missing stream wait, edge": Mutant(replace(dist, "irecv", unwaited), "edge"),
    "buffer reused early": Mutant(replace(dist, "isend", unwaited), "edge"),
    "shared communicator": Mutant(replace(dist, "new_group", one_group), "edge"),
    "collective in another order": Mutant(late_and_reversed, "replicas"),
    "device mix": Mutant(replace(LossPort, "start", on_the_host), "alone"),
    "hidden synchronization": Mutant(replace(Worker, "backward", asking), "alone"),
    "pageable copy": Mutant(replace(Staging, "_pin", lambda pin: lambda self, m: self._read(m)), "alone"),
}


def train_rank(rank: int, name: str | None, settings: dict[str, Any]) -> Any:
    """Train a mutant in one of several processes; return the weights."""
    if name is not None:
        MUTANTS[name].plant()
    return runs.train_rank(rank, runs.Case(microbatches=12, **settings)).weights


def train_alone(name: str | None) -> dict[str, int]:
    """Train a mutant in one process; return the unlisted synchronizations."""
    if name is not None:
        MUTANTS[name].plant()
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
        if found := SCENARIOS[MUTANTS[name].scenario](name, seed):
            if any(error in found for error in BROKEN):
                raise LookupError(found)
            return f"seed {seed}, {found}"
    return ""


CASES: tuple[tuple[Case, int], ...] = (
    (Case("petra", microbatches=8, transport="lockstep"), 3),
    (Case("petra", microbatches=8, transport="edge"), 2),
    (Case("pipedream", microbatches=8, transport="lockstep"), 2),
    (Case("1f1b", microbatches=8, transport="edge"), 3),
    (Case("petra", microbatches=8, arguments={"dp": 2, "stages": 2}), 4),
    (Case("petra", microbatches=8, numerics={"autocast": torch.bfloat16, "wire": torch.bfloat16}), 2),
)
"""Runs and their numbers of processes. Seeds are dealt to them in turns."""


def weights(case: Case, where: str | torch.device) -> dict[str, Tensor]:
    """Train, and return the weights of this process."""
    pipeline = case.pipeline(where)
    pipeline.train(case.source(), case.microbatches)
    return runs.host(pipeline.state_dict())


def expected_weights(rank: int, case: Case) -> dict[str, Tensor]:
    """Return the weights of one of several processes on the CPU."""
    return weights(case, "cpu")


def wrong_seeds(rank: int, case: Case, seeds: list[int], expected: list[dict[str, Tensor]]) -> list[int]:
    """Train with each seed of the delays. Return the seeds with which this rank's weights have other bits."""
    wrong = []
    for seed in seeds:
        device.extension.reseed(seed)
        found = weights(case, torch.device("cuda", rank))
        if not all(torch.equal(value, expected[rank][key]) for key, value in found.items()):
            wrong.append(seed)
    return wrong


def try_seeds(case: Case, world: int, seeds: list[int], expected: list[dict[str, Tensor]]) -> list[int]:
    """Return the seeds with which a rank has other bits, or all seeds if a process fails."""
    options = Options(seed=seeds[0], delay_rate=0.1, delay_us=500)
    parts: list[Any] = run(wrong_seeds, case, seeds, expected, world=world, options=options, timeout=600, group_timeout=120)
    return sorted({seed for part in parts for seed in part})


@pytest.mark.parametrize("name", core(MUTANTS, {1, 4}))
def test_planted_faults_are_caught(name: str) -> None:
    assert caught(name)


@pytest.mark.parametrize("scenario", core(SCENARIOS, ()))
def test_the_original_code_passes(scenario: str) -> None:
    assert SCENARIOS[scenario](None, 1) == ""


@pytest.mark.parametrize("block", core(range(31), {0}))
def test_weights_do_not_depend_on_delays(block: int) -> None:
    """Three hundred seeds in all, ten of them in a start of the processes."""
    case, world = CASES[block % len(CASES)]
    expected = run(expected_weights, case, world=world)
    seeds = [*range(10 * block + 1, 10 * block + 11)] if block else [1, 2, 3]
    assert try_seeds(case, world, seeds, expected) == []
