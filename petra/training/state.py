"""State of a pipeline as tensors by block.

A key is ``<block>/<part>/<name>``. The parts are ``model`` (weights and buffers), ``update`` (numbers that belong to a stage), and
the state of each trained parameter: ``gradient`` (accumulated, unscaled), ``average``, ``optimizer`` and ``method``, where the name
of a tensor follows that of the parameter. The numbers of a stage are stored with each of its blocks, so that any other partition
can read them. Data, dropout and learning rate follow from the seed and the clock, so they need no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from petra.engine.options.loss_scale import LossScale
from petra.engine.worker import Worker
from petra.errors import DataError, invalid
from petra.pipeline import Pipeline
from petra.training.weight_files import State, load_into, read_tensors


def state_of(pipeline: Pipeline, *, every_replica: bool = False) -> State:
    """Return the state of this process's blocks. The pipeline must be drained; most tensors are its own, not copies.

    The first replica holds the whole state (:meth:`petra.engine.options.replicas.Replicas.synchronize`). The others return nothing,
    unless ``every_replica`` asks for it: their accumulated gradients are complete only if replicas may be lost.
    """
    state: State = {}
    if pipeline.replicas is not None and not (pipeline.replicas.first or every_replica):
        return state
    for worker in pipeline.workers.values():
        numbers = {key: torch.tensor(float(n), dtype=torch.float64) for key, n in worker.update.numbers().items()}
        tensors = _tensors(worker)
        for block, module in _blocks(pipeline, worker):
            own = {f"model/{name}": value for name, value in module.state_dict().items()}
            for kind, values in tensors.items():
                part, *rest = kind.split("/")
                own |= {"/".join([part, name, *rest]): values[p] for name, p in module.named_parameters() if p in values}
            own |= {f"update/{name}": number for name, number in numbers.items()}
            state |= {f"{block}/{key}": value.detach() for key, value in own.items()}
    return state


@torch.no_grad()
def load_state(pipeline: Pipeline, state: Mapping[str, Tensor], clock: int, source: str) -> None:
    """Load what :func:`state_of` returned after ``clock`` microbatches, for the same blocks under any partition.

    A number of a stage becomes the minimum over its blocks: for the loss scale, the largest value with which none overflowed.

    Raises:
        DataError: If the state belongs to another network or another optimizer.
    """
    load_into(pipeline, _part(state, "model"), source)
    for worker in pipeline.workers.values():
        tensors: dict[str, dict[Tensor, Tensor]] = {}
        numbers: dict[str, float] = {}
        for block, module in _blocks(pipeline, worker):
            parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
            own = {key.removeprefix(f"{block}/"): value for key, value in state.items() if key.startswith(f"{block}/")}
            try:
                for key, value in own.items():
                    part, name, *rest = key.split("/")
                    if part == "update":
                        numbers[name] = min(numbers.get(name, float(value)), float(value))
                    elif part != "model":
                        parameter = parameters[name]
                        tensors.setdefault("/".join([part, *rest]), {})[parameter] = _like(parameter, value)
                missing = next((name for name in parameters if f"gradient/{name}" not in own), None)
                if missing or "update/t" not in own:
                    raise KeyError(missing or "update")
            except KeyError as error:
                raise DataError(f"{source}: block {block} does not fit (no {error.args[0]})") from error
        worker.microbatches_done = clock
        worker.update.load(numbers, tensors)
        worker.stage.resume(clock // pipeline.plan.k, tensors.get("method/previous", {}))
        scale = worker.update.part(LossScale)
        for p, gradient in tensors.get("gradient", {}).items():
            assert p.grad is not None
            own_type = gradient.to(p.grad)
            p.grad.copy_(own_type if scale is None else own_type * scale.scale)
        worker.stage.gradients.restore_used()
        if pipeline.replicas is not None:
            pipeline.replicas.restored(worker)
    pipeline.microbatches_done = clock


def network(folder: Path, *, averaged: bool = False) -> State:
    """Return the whole network in a checkpoint, under the keys of an exported file.

    Args:
        folder: Folder of the checkpoint.
        averaged: Return moving averages in place of the weights.

    Raises:
        DataError: If a file cannot be read, or averages are asked for and there are none.
    """
    wanted = ("model", "average") if averaged else ("model",)
    state = read_tensors(folder, lambda key: key.split("/")[1] in wanted)
    averages = _part(state, "average")
    if averaged and not averages:
        raise invalid(str(folder), "a checkpoint with a moving average (optim.ema)", "none", DataError)
    return _part(state, "model") | averages


def _part(state: Mapping[str, Tensor], wanted: str) -> State:
    """Return one part of a state, under the keys of an exported file."""
    split = ((key.split("/", 2), value) for key, value in state.items())
    return {f"{block}.{name}": value for (block, part, name), value in split if part == wanted}


def _blocks(pipeline: Pipeline, worker: Worker) -> Iterator[tuple[str, nn.Module]]:
    names = (pipeline.plan.model.blocks[b].name for b in pipeline.plan.stages[worker.index].blocks)
    return zip(names, worker.stage.module, strict=True)


def _tensors(worker: Worker) -> dict[str, dict[Tensor, Tensor]]:
    """Return the state of a stage's parameters by kind, then by parameter."""
    scale = worker.update.part(LossScale)
    trained: list[Tensor] = [*worker.stage.gradients.parameters]
    gradients = {p: p.grad for p in trained if p.grad is not None}
    if scale is not None:
        gradients = {p: (gradient / scale.scale).to(gradient.dtype) for p, gradient in gradients.items()}
    return {"gradient": gradients, "method/previous": worker.stage.previous(), **worker.update.tensors()}


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """Convert a value to the parameter's memory format, because the last bits of an update may depend on it."""
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value) if value.shape == parameter.shape else value
