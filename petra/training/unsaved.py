"""Notices what a remedy or a part of an update keeps between updates and a checkpoint does not contain."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, ValuesView
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from petra.engine.options.optimizer_state import Kinds
from petra.engine.update import Part
from petra.engine.worker import Worker
from petra.errors import PetraError, require
from petra.pipeline import Pipeline
from petra.torch_private import storage_key

log = logging.getLogger(__name__)
_numbers: WeakKeyDictionary[Any, dict[str, float]] = WeakKeyDictionary()
"""Numbers that parts and wrappers had when a state was last saved."""
_noticed = set[tuple[str, str]]()


def require_ended(pipeline: Pipeline) -> None:
    """Check that a pipeline is not one whose last call of train has failed: its stages are at different microbatches.

    Raises:
        PetraError: If it is.
    """
    ended = bool(pipeline.left) or not pipeline.workers
    got = f"one whose train() failed after microbatch {pipeline.microbatches_done}"
    require(ended, "pipeline", "one whose last train() has returned, or a restored one", got, PetraError)


def notice_unsaved(worker: Worker, kinds: Kinds) -> None:
    """Log a warning, once for each class and attribute, if a part or a wrapper of a stage keeps what ``kinds`` lack.

    Looked at are tensors, also in containers, and numbers that have changed since the last call, of classes outside the engine.
    """
    stage, update = worker.stage, worker.update
    states = [] if update.optimizer is None else update.optimizer.state.values()
    tensors = [*stage.module.state_dict().values(), *(t for each in kinds.values() for t in each.values()), *_tensors(states)]
    saved = {storage_key(t) for t in (*tensors, *stage.gradients.parameters)}
    saved |= {storage_key(p.grad) for p in stage.gradients.parameters if p.grad is not None}
    for owner in (*update.parts, *(each for runner in stage.runners for each in _chain(runner)), *_chain(worker.upstream)):
        if type(owner).__module__.startswith(("petra.engine.", "petra.transport.")):
            continue
        numbers = {*owner.numbers().values()} if isinstance(owner, Part) else set()
        for name in (*_unsaved_tensors(owner, saved), *_changed_numbers(owner, numbers)):
            kind = type(owner).__name__
            if (kind, name) not in _noticed:
                _noticed.add((kind, name))
                text = (
                    "checkpoint: expected all that %s keeps in tensors() and numbers() of a part (petra.engine.update.Part), got %s"
                )
                log.warning(f"{text} besides; a resumed run starts without it", kind, name)


def _chain(outer: Any) -> Iterator[Any]:
    """Yield a wrapper, what it contains, and so on."""
    while outer is not None:
        yield outer
        outer = vars(outer).get("inner")


def _unsaved_tensors(owner: Any, saved: Collection[object]) -> list[str]:
    return [name for name, value in vars(owner).items() if any(storage_key(t) not in saved for t in _tensors(value))]


def _changed_numbers(owner: Any, saved: Collection[object]) -> list[str]:
    found = {name: value for name, value in vars(owner).items() if type(value) in (int, float) and value not in saved}
    before = _numbers.get(owner, found)
    _numbers[owner] = found
    return [name for name, value in found.items() if before.get(name, value) != value]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, in containers and in their containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors([*value.values()])
    elif isinstance(value, list | tuple | set | deque | ValuesView):
        for each in value:
            yield from _tensors(each)
