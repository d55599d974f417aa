"""Planted faults: each is put into a copy of the code in memory, and the emulation must catch it.

``python -m tests.emulated.mutants``
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tests.emulated.device import Options


@dataclass(frozen=True)
class Mutant:
    """A fault in one module.

    Attributes:
        kind: Kind of the fault.
        module: Name of the module.
        changes: Replaced parts of its source, each of which must occur.
        scenario: Key of :data:`SCENARIOS`, the run that must fail.
    """

    kind: str
    module: str
    changes: Mapping[str, str]
    scenario: str

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.module}"


def _without(line: str, following: str) -> dict[str, str]:
    """Return the change that replaces ``line`` by ``pass`` where the source goes on with ``following``."""
    return {f"{line}{following}": f"pass{following}"}


_LATE_BUCKETS = {  # the second replica starts its all-reduces at the end, and in the reverse order
    "            for bucket in self._buckets[block]:\n": """\
            late = self.__dict__.setdefault("late", [])
            if dist.get_rank(self.sums._group):
                late[:0] = self._buckets[block]
                return
            for bucket in self._buckets[block]:
""",
    "        joint = torch.cat([value.flatten() for value in values])\n": """\
        for bucket in self.__dict__.pop("late", []):
            self.sums.start(bucket)
        joint = torch.cat([value.flatten() for value in values])
""",
}
_BROADCAST = {
    "            self.sums.start(joint)\n": """\
            if dist.get_rank(group := self.sums._group):
                dist.broadcast(joint, group=group, group_src=0)
            else:
                self.sums.start(joint)
"""
}
_SENDS_FIRST = {
    """\
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend if o.sends else dist.irecv, o.buffer, o.peer, o.group) for o in operations]
    )
""": """\
    ordered = sorted(operations, key=lambda o: not o.sends)
    posted = {id(o): (dist.isend if o.sends else dist.irecv)(o.buffer, o.peer, o.group) for o in ordered}
    return [posted[id(o)] for o in operations]
"""
}
_ONE_GROUP = {"for _ in range(2))\n": "for _ in range(1)) * 2\n", "down, up = (": "down, up = tuple("}
_ITEM = {"        pending = Pending(": "        self._squared_norm.item()\n        pending = Pending("}
_BOOL = {
    "    def backward(self, m: int) -> None:\n": """\
    def backward(self, m: int) -> None:
        bool(next(self.stage.module.parameters()).sum())
"""
}
_TARGETS = {"staged(data.targets, self.device, range(start, start + microbatches))": "data.targets"}
_SCALAR = {"dtype=torch.float64, device=device)": "dtype=torch.float64).reshape(1)[0]"}
_PAGEABLE = {"self._read(m).pin_memory()": "self._read(m)"}

LOCKSTEP, EDGE, REPLICAS = "petra.transport.lockstep", "petra.transport.edge", "petra.engine.options.replicas"
WAIT, EARLY = "missing stream wait", "buffer reused early"
SHARED, ORDER = "send before receive on a shared communicator", "collective in another order"
MIX, HIDDEN = "device mix", "hidden synchronization"

MUTANTS = (
    Mutant(WAIT, LOCKSTEP, _without("work.wait()", "\n        return self.incoming"), "lockstep"),
    Mutant(WAIT, EDGE, _without("work.wait()", "\n        if self._ahead:"), "edge"),
    Mutant(EARLY, LOCKSTEP, _without("work.wait()", "\n            port.outgoing.release"), "lockstep"),
    Mutant(EARLY, EDGE, _without("work.wait()", "\n        self.packing.release"), "edge"),
    Mutant(SHARED, LOCKSTEP, _SENDS_FIRST, "lockstep, d = 1"),
    Mutant(SHARED, EDGE, _ONE_GROUP, "edge"),
    Mutant(ORDER, REPLICAS, _LATE_BUCKETS, "replicas"),
    Mutant(ORDER, REPLICAS, _BROADCAST, "replicas"),
    Mutant(MIX, "petra.engine.endpoints", _TARGETS, "alone"),
    Mutant(MIX, "petra.engine.options.finite_check", _SCALAR, "alone, fp16"),
    Mutant(HIDDEN, "petra.engine.update", _ITEM, "alone"),
    Mutant(HIDDEN, "petra.engine.worker", _BOOL, "alone"),
    Mutant(HIDDEN, "petra.engine.options.staging", _PAGEABLE, "alone"),
)


class _Finder(importlib.abc.MetaPathFinder):
    """Loads one module from changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(self.mutant, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, mutant: Mutant, path: str) -> None:
        super().__init__(mutant.module, path)
        self.mutant = mutant

    def get_code(self, fullname: str) -> Any:
        source = self.get_data(self.path).decode()
        for old, new in self.mutant.changes.items():
            if old not in source:
                raise LookupError(f"{self.mutant.name}: the source no longer contains {old!r}")
            source = source.replace(old, new)
        return compile(source, self.path, "exec")


def plant(mutant: Mutant | None) -> None:
    """Make this process import the changed module. petra must not have been imported."""
    if mutant is not None:
        assert "petra" not in sys.modules
        sys.meta_path.insert(0, _Finder(mutant))


def train_rank(rank: int, mutant: Mutant | None, settings: dict[str, Any]) -> Any:
    """Train a mutant in one of several processes; return the weights."""
    plant(mutant)
    from tests.emulated import runs

    return runs.train_rank(rank, runs.Case(microbatches=12, **settings)).weights


def train_streams(mutant: Mutant | None) -> list[float]:
    """Train a mutant in one process on several streams; return how much its weights differ from those of one stream, by seed."""
    plant(mutant)
    from tests.emulated.runs import Case
    from tests.emulated.test_streams import BOTH, OVERLAP, differences

    return differences(Case(microbatches=12), [OVERLAP, BOTH], [1, 2, 3])


def train_alone(mutant: Mutant | None, setting: str | None) -> Any:
    """Train a mutant in one process, with a setting of ``test_training``; return the loss and the unlisted synchronizations."""
    plant(mutant)
    from tests.emulated import runs
    from tests.emulated.test_training import SETTINGS, excess

    case = runs.Case(microbatches=40, **(SETTINGS[setting] if setting else {}))
    found, losses = runs.synchronizations(case)
    return losses, excess(found, case)


def _expected(world: int, settings: dict[str, Any]) -> Any:
    from tests.emulated import runs
    from tests.emulated.processes import run

    return run(runs.train_cpu_rank, runs.Case(microbatches=12, **settings), world=world)


def _in_processes(world: int, **settings: Any) -> Callable[[Mutant | None, int], str]:
    expected = functools.cache(lambda: _expected(world, settings))

    def scenario(mutant: Mutant | None, seed: int) -> str:
        from tests.emulated.processes import start

        options = Options(seed=seed, delay_rate=0.2)
        limits = {"group_timeout": 5, "timeout": 60}
        ended = start(train_rank, mutant, settings, world=world, options=options, preloads_petra=False, **limits)
        if ended.statuses != [0] * world:
            return _summary(ended)
        pairs = [(f[key], e[key]) for f, e in zip(ended.results, (part.weights for part in expected()), strict=True) for key in e]
        wrong = sum(not found.equal(right) for found, right in pairs)
        return f"{wrong} of {len(pairs)} tensors have other bits" if wrong else ""

    return scenario


def _alone(mutant: Mutant | None, seed: int, setting: str | None = None) -> str:
    from tests.emulated.processes import start

    ended = start(train_alone, mutant, setting, options=Options(seed=seed), preloads_petra=False)
    if ended.statuses != [0]:
        return _summary(ended)
    ((_, syncs),) = ended.results
    return f"host synchronizations: {syncs}" if syncs else ""


def _summary(ended: Any) -> str:
    lines = [line for text in ended.outputs for line in text.splitlines() if "Error" in line or "emulated NCCL" in line]
    return f"statuses {ended.statuses}: {lines[-1] if lines else ended.outputs}"


SCENARIOS: dict[str, Callable[[Mutant | None, int], str]] = {
    "lockstep": _in_processes(3, transport="lockstep"),
    "lockstep, d = 1": _in_processes(3, transport="lockstep", method="pipedream"),
    "edge": _in_processes(3, transport="edge"),
    "replicas": _in_processes(4, arguments={"dp": 2, "stages": 2}),
    "alone": _alone,
    "alone, fp16": functools.partial(_alone, setting="fp16"),
}
"""Runs by name. Each returns what is wrong with a mutant, or an empty string. Without a mutant it returns an empty string."""


BROKEN = ("LookupError", "AttributeError", "NameError", "TypeError", "SyntaxError", "ImportError")
"""Errors of a mutant whose source no longer fits, rather than of the emulation."""


def caught(mutant: Mutant, seeds: int = 3) -> str:
    """Return how a mutant was caught by one of the first seeds, or an empty string.

    Raises:
        LookupError: If the mutant doesn't fit the source any more.
    """
    for seed in range(1, seeds + 1):
        if found := SCENARIOS[mutant.scenario](mutant, seed):
            if any(error in found for error in BROKEN):
                raise LookupError(found)
            return f"seed {seed}, {found}"
    return ""


def main() -> None:
    """Run the original code and all mutants; print how each was caught. Exit with status 1 if one was not."""
    from tests.emulated import mutants  # functions of __main__ can't be sent to other processes

    survivors = 0
    for name, scenario in mutants.SCENARIOS.items():
        found = scenario(None, 1)
        survivors += bool(found)
        print(f"original code, {name}: {found or 'passes'}", flush=True)
    for mutant in mutants.MUTANTS:
        start = time.monotonic()
        found = mutants.caught(mutant)
        survivors += not found
        print(f"{mutant.name}: {f'caught ({found[:200]})' if found else 'SURVIVES'}, {time.monotonic() - start:.1f} s", flush=True)
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
