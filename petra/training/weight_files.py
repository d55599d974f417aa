"""Export a trained network to one file, for plain PyTorch: :meth:`petra.Model.build` and ``load_state_dict(strict=True)``."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from petra.distributed import message_group, raise_on_all_ranks
from petra.errors import ConfigError, DataError, ModelError, first_line, invalid, require
from petra.pipeline import Pipeline
from petra.training.records import replaced, writing
from petra.training.unsaved import require_ended

FORMATS = {"pt": ".pt", "safetensors": ".safetensors"}
"""File suffix of each format."""

FACTS = "petra"
"""Key of the facts in a file's metadata."""
HASH = "sha256"
"""Key of the :func:`hash_of` the tensors in the facts."""
TENSORS = ".pt"
"""Suffix of the files of a checkpoint that hold tensors."""

State = dict[str, Tensor]
"""Tensors by key."""


def gathered_blocks(pipeline: Pipeline) -> Iterator[tuple[str, State]]:
    """Yield the name and the state of every block of the network, in order, in the process of the first stage.

    The other processes send their blocks, one at a time, and yield nothing. All processes must exhaust the iterator. States are on
    the CPU.
    """
    own, group = dict(pipeline.blocks()), message_group()
    for process, stages in enumerate(pipeline.plan.layout.processes):
        rank = process * pipeline.plan.layout.tp
        for block in (b for j in stages for b in pipeline.plan.layout.stages[j]):
            name = pipeline.plan.model.blocks[block].name
            message: list[Any] = [None]
            state = own[name].state_dict() if name in own else {}  # gathers tensors that several processes divide
            if pipeline.rank == rank:
                message = [{key: value.detach().to("cpu", copy=True) for key, value in state.items()}]
                if rank != 0:
                    dist.send_object_list(message, 0, group, torch.device("cpu"))
            elif pipeline.rank == 0:
                dist.recv_object_list(message, rank, group, torch.device("cpu"))
            if pipeline.rank == 0:
                yield name, message[0]


def export(pipeline: Pipeline, path: Path, facts: Mapping[str, Any] | None = None) -> None:
    """Write the state of the whole network to a file, in the format of its suffix. All processes must call this function.

    The process of the first stage writes the file.

    Args:
        facts: Values that JSON can represent, such as the normalisation of inputs. They are stored as the file's metadata, so that
            the tensors remain those of the network. :func:`facts_in` returns them, ``clock``, the number of microbatches done, and
            the :func:`hash_of` the tensors.

    Raises:
        ConfigError: If there is no format with this suffix, or safetensors is not installed.
        DataError: If the file cannot be written.
        PetraError: If the last call of ``train`` has failed.
    """
    check_format(path.suffix)
    with raise_on_all_ranks(call=f"export({path.name})"):
        require_ended(pipeline)
    state = {f"{name}.{key}": value.contiguous() for name, block in gathered_blocks(pipeline) for key, value in block.items()}
    if pipeline.rank != 0:
        return
    known = {**(facts or {}), "clock": pipeline.microbatches_done, HASH: hash_of(state)}
    text = {FACTS: json.dumps(known)}
    with writing(path), replaced(path) as file:
        if path.suffix == ".pt":
            ordered = OrderedDict(state)
            # As Module.state_dict() does; load_state_dict() reads only the entries of modules' versions.
            vars(ordered)["_metadata"] = {"": text}
            torch.save(ordered, file)
        else:
            from safetensors.torch import save_file

            save_file(state, file.name, metadata=text)


def load(path: Path) -> State:
    """Return the state in an exported file, on the CPU.

    Raises:
        DataError: If the file is missing or damaged, does not hold tensors by name or those of its hash, or some are NaN.
        ConfigError: If there is no format with this suffix, or safetensors is not installed.
    """
    state, facts = _read(path, mapped=False)
    fits = facts.get(HASH, found := hash_of(state)) == found
    require(fits, str(path), "the weights that were exported, as their hash says", "others, so the file is damaged", DataError)
    for key, value in state.items():
        require(not value.isnan().any(), f"{path}, {key}", "numbers", "NaN", DataError)
    return state


def hash_of(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors and their names. It takes about a second per GB."""
    digest = hashlib.sha256()
    for key, value in sorted(state.items()):
        digest.update(f"{key} {value.dtype} {[*value.shape]}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(folder: Path, wanted: Callable[[str], bool], check: Callable[[Path], object] = lambda path: None) -> State:
    """Return the tensors of a checkpoint whose keys satisfy ``wanted``, on the CPU. Each process reads on its own.

    Args:
        check: Called for each file that has some of them, before they are read.

    Raises:
        DataError: If a file cannot be read, or there is none.
    """
    if not (files := sorted(folder.glob(f"*{TENSORS}"))):
        expected = f"a checkpoint of this version, with files *{TENSORS} (commit d61decdd reads older ones)"
        raise invalid(str(folder), expected, "none", DataError)
    found: State = {}
    for path in files:
        if own := {key: value for key, value in _read(path, mapped=True)[0].items() if wanted(key)}:
            check(path)
            found |= {key: value.clone() for key, value in own.items()}
    return found


def facts_in(path: Path) -> dict[str, Any]:
    """Return the facts that a file was exported with and its ``clock`` in microbatches; empty if another program has written it.

    Raises:
        DataError: As for :func:`load`.
    """
    return _read(path, mapped=True)[1]


def _read(path: Path, *, mapped: bool) -> tuple[State, dict[str, Any]]:
    """Return the state in a file and its facts. Tensors that are ``mapped`` from a .pt file are read when they are used, others of
    safetensors are left out.
    """
    check_format(path.suffix)
    try:
        if path.suffix == ".pt":
            state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            text = getattr(state, "_metadata", {}).get("", {})
        else:
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                text, names = file.metadata() or {}, () if mapped else file.keys()
                state = {name: file.get_tensor(name) for name in names}
        facts: dict[str, Any] = json.loads(text.get(FACTS, "{}"))
    except Exception as error:  # each format has its own errors for damage
        raise DataError(f"{path}: cannot be read as exported weights ({first_line(error)})") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise invalid(str(path), "a state dict of tensors", type(state).__name__, DataError)
    return state, facts


def load_into(pipeline: Pipeline, state: Mapping[str, Tensor], source: str, skip: Collection[str] = ()) -> None:
    """Load the state of a whole network into this process's blocks, and restart moving averages from it.

    Args:
        pipeline: This process's part of the pipeline.
        state: Tensors of the network by ``<block>.<key>``, each with the shape of its parameter or buffer.
        source: Where the state is from, for messages.
        skip: Names of blocks that keep their weights. ``state`` may have them in another form, or not at all.

    Raises:
        DataError: If the state belongs to another network. The message names the first block that does not fit.
    """
    kept = {key: value for key, value in pipeline.state_dict().items() if key.partition(".")[0] in skip}
    loaded = {key: value for key, value in state.items() if key.partition(".")[0] not in skip}
    try:
        pipeline.load_state_dict(loaded | kept)
    except ModelError as error:
        raise DataError(f"{source}: {error}") from error


def check_format(suffix: str) -> None:
    """Check that files with this suffix can be written and read.

    Raises:
        ConfigError: If there is no format with this suffix, or safetensors is not installed.
    """
    accepted = f"a file name that ends in {' or '.join(FORMATS.values())}"
    require(suffix in FORMATS.values(), "weights", accepted, suffix or "no suffix")
    if suffix == ".safetensors" and find_spec("safetensors") is None:
        raise ConfigError(
            "trainer.export: safetensors is not installed; run pip install -e '.[safetensors]' or set trainer.export=pt"
        )
