"""A trained network as one file that plain PyTorch loads: :meth:`petra.Model.build` and ``load_state_dict(strict=True)``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from petra.errors import ConfigError, DataError, first_line
from petra.pipeline import Pipeline

FORMATS = {"pt": ".pt", "safetensors": ".safetensors"}
"""Suffix of each format's file."""

State = dict[str, Tensor]


def gathered_blocks(pipeline: Pipeline) -> Iterator[tuple[str, State]]:
    """Name and state of every block of the network, in order, in the process of the first stage; the others send and get nothing.

    States are on the CPU, and one block travels at a time. Every process must walk through it to the end.
    """
    own = dict(pipeline.blocks())
    for rank, stages in enumerate(pipeline.plan.layout.processes):
        for block in (b for j in stages for b in pipeline.plan.layout.stages[j]):
            name = pipeline.plan.model.blocks[block].name
            message: list[Any] = [None]
            if pipeline.rank == rank:
                message = [{key: value.detach().to("cpu", copy=True) for key, value in own[name].state_dict().items()}]
            if rank != 0 and pipeline.rank == rank:
                dist.send_object_list(message, 0, device=torch.device("cpu"))
            if rank != 0 and pipeline.rank == 0:
                dist.recv_object_list(message, rank, device=torch.device("cpu"))
            if pipeline.rank == 0:
                yield name, message[0]


def export(pipeline: Pipeline, path: Path) -> None:
    """Writes the whole network's state into a file of the format that its suffix tells; the process of the first stage does.

    Raises:
        ConfigError: another suffix, or safetensors isn't installed.
        DataError: the file can't be written.
    """
    require(path.suffix)
    state = {f"{name}.{key}": value.contiguous() for name, block in gathered_blocks(pipeline) for key, value in block.items()}
    if pipeline.rank != 0:
        return
    draft = path.with_name(path.name + ".part")
    try:
        if path.suffix == ".pt":
            torch.save(state, draft)
        else:
            from safetensors.torch import save_file

            save_file(state, draft)
        os.replace(draft, path)
    except Exception as error:  # each format has errors of its own for a full disk
        draft.unlink(missing_ok=True)
        raise DataError(f"{path}: can't be written ({first_line(error)})") from error


def load(path: Path) -> State:
    """The state in an exported file, on the CPU.

    Raises:
        DataError: a file that is missing or damaged, or holds something else than tensors.
        ConfigError: as :func:`export`.
    """
    require(path.suffix)
    try:
        if path.suffix == ".pt":
            state: Any = torch.load(path, map_location="cpu", weights_only=True)
        else:
            from safetensors.torch import load_file

            state = load_file(path)
    except Exception as error:  # each format has errors of its own for damage
        raise DataError(f"{path}: can't be read as exported weights ({first_line(error)})") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise DataError(f"{path}: found something else, accepted is a state dict, tensors by name")
    return state


def load_into(pipeline: Pipeline, state: Mapping[str, Tensor], source: str) -> None:
    """Gives this process's blocks the weights and statistics of a whole network; moving averages start there.

    Raises:
        DataError: it is another network's; the text names the first block that doesn't fit.
    """
    names = {block.name for block in pipeline.plan.model.blocks}
    strange = [key for key in state if key.partition(".")[0] not in names]
    if strange:
        raise DataError(f"{source}: found {strange[0]}, but {pipeline.plan.model.name} has no such block")
    for name, block in pipeline.blocks():
        part = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
        try:
            block.load_state_dict(part)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{source}: block {name} does not fit ({reason})") from error
    for worker in pipeline.workers.values():
        worker.update.restart_averages()


def require(suffix: str) -> None:
    """Raises :class:`petra.errors.ConfigError` for a file that can't be written or read here."""
    if suffix not in FORMATS.values():
        raise ConfigError(f"weights: found a file that ends in {suffix or 'nothing'}, accepted are {', '.join(FORMATS.values())}")
    if suffix == ".safetensors" and find_spec("safetensors") is None:
        raise ConfigError("trainer.export: found safetensors, which is not installed; pip install -e '.[safetensors]', or pt")
