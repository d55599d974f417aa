"""State of a pipeline as tensors by block.

A key is ``<block>/<part>/<name>``. The parts are ``model`` (weights and buffers), ``optimizer``, ``average``, ``gradient`` (the
accumulated gradient, unscaled), ``method`` (older weights, what remedies accumulate, and the last finite running statistics), and
``update`` (numbers of a stage).
Optimizer and method have several tensors per parameter: ``<block>/optimizer/<parameter>/<kind>``. The numbers of a stage are
stored with each of its blocks, so that any other partition can read them. Data, dropout and learning rate follow from the seed
and the clock, so they need no state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from petra.engine.checks import left_by
from petra.engine.options.between_calls import notice_changes, renew
from petra.engine.options.optimizer_state import Kinds
from petra.engine.options.outer_step import MEAN, MOMENTUM
from petra.engine.options.state import code_of, kinds_of, load_kinds, numbers_of
from petra.errors import DataError, require
from petra.pipeline import Pipeline
from petra.training.unsaved import notice_unsaved
from petra.training.weight_files import State, load_into

SHARED = tuple(kind.removeprefix("method") for kind in (MEAN, MOMENTUM))
"""Ends of the names of what replicas that train apart have in common."""


def state_of(pipeline: Pipeline, *, every_replica: bool = False) -> State:
    """Return the state of this process's blocks. The pipeline must be drained; most tensors are its own, not copies.

    The first replica holds the whole state (:meth:`petra.engine.options.replicas.Replicas.synchronize`), except for optimizer state
    that is divided over replicas: each returns its own. Otherwise the others return nothing, unless ``every_replica`` asks for it:
    their accumulated gradients are complete only if replicas may be lost. Replicas that train apart each return their own state,
    whose parts have names such as ``optimizer@1``, with the index of the replica, except for the first one.
    """
    notice_changes(pipeline.left, pipeline.noticed, modes=False)
    state: State = {}
    whole = pipeline.replicas is None or pipeline.replicas.first or every_replica
    apart = pipeline.replicas is not None and pipeline.replicas.apart
    if not (whole or apart or pipeline.recipe.rules.shard):
        return state
    for worker in pipeline.workers.values():
        kinds, numbers = kinds_of(worker), numbers_of(worker)
        notice_unsaved(worker, kinds)
        kinds = kinds if pipeline.replicas is None else pipeline.replicas.whole(kinds)
        for block, module in pipeline.blocks_of(worker.index):
            state |= {f"{block}/model/{name}": value.detach() for name, value in module.state_dict().items()}
            for name, p in (_trained(module) | dict(module.named_buffers())).items():
                for kind, values in kinds.items():
                    part, _, rest = kind.partition("/")
                    if p in values:
                        state["/".join([block, part, name, *([rest] if rest else [])])] = values[p].detach()
            state |= {f"{block}/update/{key}": torch.tensor(n, dtype=torch.float64) for key, n in numbers.items()}
    if pipeline.replicas is not None and pipeline.replicas.member:
        return {}
    if whole:
        return state
    if apart:
        own = {tuple(key.split("/", 2)): value for key, value in state.items() if not key.endswith(SHARED)}
        return {f"{b}/{part}@{pipeline.replica}/{name}": value for (b, part, name), value in own.items() if part != "model"}
    return {key: value for key, value in state.items() if key.split("/")[1] == "optimizer"}


def belongs_to(key: str, blocks: Collection[str], replica: int) -> bool:
    """Return whether a tensor is part of the state of blocks, and not that of another replica alone."""
    block, part = key.split("/")[:2]
    return block in blocks and part.partition("@")[2] in ("", str(replica))


def load_state(pipeline: Pipeline, state: Mapping[str, Tensor], clock: int, source: str) -> None:
    """Load what :func:`state_of` returned after ``clock`` microbatches, for the same blocks under any partition.

    A number of a stage becomes the minimum over its blocks: for the loss scale, the largest value with which none overflowed.

    Raises:
        DataError: If the state belongs to another network or another optimizer.
    """
    blocks: dict[str, State] = defaultdict(dict)
    at = f"@{pipeline.replica}/"
    own_keys = {key.replace(at, "/", 1): value for key, value in state.items() if at in key}
    for key, value in {**{key: value for key, value in state.items() if at not in key}, **own_keys}.items():
        block, _, rest = key.partition("/")
        blocks[block][rest] = value
    model = "model/"
    weights = {f"{b}.{k.removeprefix(model)}": v for b, own in blocks.items() for k, v in own.items() if k.startswith(model)}
    load_into(pipeline, weights, source)
    for worker in pipeline.workers.values():
        kinds: Kinds = defaultdict(dict)
        numbers: dict[str, float] = {}
        for block, module in pipeline.blocks_of(worker.index):
            try:
                _read_block(module, blocks[block], kinds, numbers)
            except KeyError as error:
                raise DataError(f"{source}: block {block} does not fit (no {error.args[0]})") from error
        k, done, last = pipeline.plan.k, numbers["done"], numbers["t"]
        expected = f"{clock // k} updates after {clock} microbatches, with k={k}"
        found = f"{done:.0f}, the last one after {last:.0f}"
        require((done, last) == (clock // k, clock // k * k), source, expected, found, DataError)
        own = worker.update.optimizer
        same = own is None or numbers.get("optimizer", code_of(own)) == code_of(own)
        require(same, source, f"the optimizer state of {type(own).__name__}", "that of another class", DataError)
        try:
            load_kinds(worker, kinds if pipeline.replicas is None else pipeline.replicas.own(kinds), numbers, clock)
        except KeyError as error:
            raise DataError(f"{source}: expected the state of this optimizer, got none of {error.args[0]}") from error
        if pipeline.replicas is not None:
            pipeline.replicas.restored(worker)
    pipeline.microbatches_done = clock
    renew(pipeline.left, "gradients")
    pipeline.left = pipeline.left or left_by(pipeline.workers.values())  # also after a call that has failed


def _read_block(module: nn.Module, state: State, kinds: Kinds, numbers: dict[str, float]) -> None:
    """Add a block's tensors to ``kinds``, and the minimum of its numbers to ``numbers``."""
    trained = _trained(module)
    own: dict[str, Tensor] = {**trained, **dict(module.named_buffers())}
    for key, value in state.items():
        part, _, name = key.partition("/")
        if part == "update":
            numbers[name] = min(float(value), numbers.get(name, float(value)))
        elif part in ("optimizer", "method"):
            name, _, kind = name.rpartition("/")
            p = own[name]
            # In the parameter's memory format: the last bits of an update may depend on it.
            kinds[f"{part}/{kind}"][p] = torch.empty_like(p, dtype=value.dtype).copy_(value) if value.shape == p.shape else value
        elif part != "model":
            kinds[part][trained[name]] = value
    missing = [name for name in ("update/done", *(f"gradient/{name}" for name in trained)) if name not in state]
    if missing:
        raise KeyError(missing[0])


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
