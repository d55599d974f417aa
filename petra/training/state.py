"""State of a pipeline as tensors by block.

A key is ``<block>/<part>/<name>``. The parts are ``model`` (weights and buffers), ``optimizer``, ``average``, ``gradient`` (the
accumulated gradient), ``method``, and ``update`` (numbers that belong to a stage). The numbers of a stage are stored with each of
its blocks, so that any other partition can read them. Data, dropout and learning rate follow from the seed and the clock, so they
need no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from petra.engine.method_state import load_method_state, method_state
from petra.engine.update_state import load_update_state, update_state
from petra.errors import DataError, invalid
from petra.pipeline import Pipeline
from petra.training.weight_files import State, load_into, read_tensors

Parts = dict[str, State]
"""State of one block, by part."""


def state_of(pipeline: Pipeline, *, every_replica: bool = False) -> State:
    """Return the state of this process's blocks. The pipeline must be drained; most tensors are its own, not copies.

    The first replica holds the whole state (:meth:`petra.engine.options.replicas.Replicas.synchronize`). The others return nothing,
    unless ``every_replica`` asks for it: their accumulated gradients are complete only if replicas may be lost.
    """
    state: State = {}
    if pipeline.replicas is not None and not (pipeline.replicas.first or every_replica):
        return state
    for j, worker in pipeline.workers.items():
        update = update_state(worker.stage, worker.update)
        numbers = {key: torch.tensor(float(n), dtype=torch.float64) for key, n in update["stage"].items() if n is not None}
        for b, module, own in zip(pipeline.plan.layout.stages[j], worker.stage.module, update["blocks"], strict=True):
            parts = {"model": module.state_dict(), **_update_parts(own), "update": numbers}
            block = pipeline.plan.model.blocks[b].name
            state |= {f"{block}/{part}/{name}": value.detach() for part, values in parts.items() for name, value in values.items()}
    for kind, by_key in method_state(pipeline.plan, pipeline.workers).items():
        for key, value in by_key.items():
            block, _, name = key.partition(".")
            state[f"{block}/method/{name}/{kind}"] = value.detach()
    return state


def load_state(pipeline: Pipeline, state: Mapping[str, Tensor], clock: int, source: str) -> None:
    """Load what :func:`state_of` returned after ``clock`` microbatches, for the same blocks under any partition.

    A number of a stage becomes the minimum over its blocks: for the loss scale, the largest value with which none overflowed.

    Raises:
        DataError: If the state belongs to another network or another optimizer.
    """
    blocks = _by_block(state)
    weights = {f"{block}.{name}": value for block, parts in blocks.items() for name, value in parts.get("model", {}).items()}
    load_into(pipeline, weights, source)
    for j, worker in pipeline.workers.items():
        load_update_state(worker.stage, worker.update, _update_state(pipeline, j, blocks, source))
        worker.microbatches_done = clock
        if pipeline.replicas is not None:
            pipeline.replicas.restored(worker)
    pipeline.microbatches_done = clock
    load_method_state(pipeline.plan, pipeline.workers, _method_state(pipeline, blocks))


def network(folder: Path, *, averaged: bool = False) -> State:
    """Return the whole network in a checkpoint, under the keys of an exported file.

    Args:
        folder: Folder of the checkpoint.
        averaged: Return moving averages in place of the weights.

    Raises:
        DataError: If a file cannot be read, or averages are asked for and there are none.
    """
    wanted = ("model", "average") if averaged else ("model",)
    blocks = _by_block(read_tensors(folder, lambda key: key.split("/")[1] in wanted))
    if averaged and not any("average" in parts for parts in blocks.values()):
        raise invalid(str(folder), "a checkpoint with a moving average (optim.ema)", "none", DataError)
    return {
        f"{block}.{name}": value
        for part in wanted  # averages replace weights
        for block, parts in blocks.items()
        for name, value in parts.get(part, {}).items()
    }


def _by_block(state: Mapping[str, Tensor]) -> dict[str, Parts]:
    blocks: dict[str, Parts] = {}
    for key, value in state.items():
        block, part, name = key.split("/", 2)
        blocks.setdefault(block, {}).setdefault(part, {})[name] = value
    return blocks


def _update_parts(own: Mapping[str, Any]) -> Parts:
    """Return a block's part of :func:`petra.engine.update_state.update_state` as parts of the state."""
    optimizer = {
        f"{name}/{key}": value for name, values in own["optimizer"].items() for key, value in values.items() if value is not None
    }
    return {"optimizer": optimizer, "average": own["average"], "gradient": own["gradient"]}


def _update_state(pipeline: Pipeline, j: int, blocks: Mapping[str, Parts], source: str) -> dict[str, Any]:
    """Return a stage's argument for :func:`petra.engine.update_state.load_update_state`."""
    own, numbers = [], []
    for b, module in zip(pipeline.plan.layout.stages[j], pipeline.workers[j].stage.module, strict=True):
        name = pipeline.plan.model.blocks[b].name
        try:
            own.append(_block_update_state(module, blocks[name]))
            numbers.append(blocks[name]["update"])
        except KeyError as error:
            raise DataError(f"{source}: block {name} does not fit (no {error.args[0]})") from error
    smallest = {key: min(float(n[key]) for n in numbers) for key in numbers[0]}
    return {"stage": smallest, "blocks": own}


def _block_update_state(module: nn.Module, parts: Parts) -> dict[str, Any]:
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer: dict[str, State] = {name: {} for name in parameters}
    for key, value in parts.get("optimizer", {}).items():
        name, _, kind = key.rpartition("/")
        optimizer[name][kind] = _like(parameters[name], value)
    return {
        "optimizer": optimizer,
        "average": parts.get("average", {}),
        "gradient": {name: parts["gradient"][name] for name in parameters},
    }


def _method_state(pipeline: Pipeline, blocks: Mapping[str, Parts]) -> dict[str, dict[str, Tensor]]:
    """Return the argument for :func:`petra.engine.method_state.load_method_state`."""
    method: dict[str, dict[str, Tensor]] = {}
    for name, module in pipeline.blocks():
        for key, value in blocks[name].get("method", {}).items():
            parameter, _, kind = key.rpartition("/")
            method.setdefault(kind, {})[f"{name}.{parameter}"] = _like(module.get_parameter(parameter), value)
    return method


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """Convert a value to the parameter's memory format, because the last bits of an update may depend on it."""
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value) if value.shape == parameter.shape else value
