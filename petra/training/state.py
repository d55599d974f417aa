"""A pipeline's whole state as tensors by block, in the format of ``torch.distributed.checkpoint``.

A key is ``<block>/<part>/<name>``. Parts are ``model`` (weights and buffers), ``optimizer``, ``average``, ``gradient`` (what has
been accumulated), ``method``, and ``update``: numbers that belong to a stage and are written for each of its blocks, so that any
cut can read them. Nothing else has to be known: data, dropout and learning rate follow from the seed and the clock.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from petra.errors import DataError, first_line
from petra.pipeline import Pipeline
from petra.training.export import State, load_into

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(t).removeprefix("torch.") for t in vars(torch).values() if isinstance(t, torch.dtype))},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
}


def state_of(pipeline: Pipeline) -> State:
    """The state of this process's blocks; the pipeline is drained. Most tensors are the pipeline's own, not copies.

    Of replicas the first one has it all (:meth:`petra.engine.data_parallel.Replicas.synchronize`), and the others tell nothing.
    """
    state: State = {}
    if pipeline.replica:
        return state
    for j, worker in pipeline.workers.items():
        update = worker.update.state_dict()
        numbers = {key: torch.tensor(float(n), dtype=torch.float64) for key, n in update["stage"].items() if n is not None}
        for b, module, own in zip(pipeline.plan.layout.stages[j], worker.stage.module, update["blocks"], strict=True):
            optimizer = {
                f"{name}/{key}": value
                for name, values in own["optimizer"].items()
                for key, value in values.items()
                if value is not None
            }
            parts = {
                "model": module.state_dict(),
                "optimizer": optimizer,
                "average": own["average"],
                "gradient": own["gradient"],
                "update": numbers,
            }
            block = pipeline.plan.model.blocks[b].name
            state |= {f"{block}/{part}/{name}": value.detach() for part, found in parts.items() for name, value in found.items()}
    for kind, values in pipeline.method_state().items():
        for key, value in values.items():
            block, _, name = key.partition(".")
            state[f"{block}/method/{name}/{kind}"] = value.detach()
    return state


def load_state(pipeline: Pipeline, state: Mapping[str, Tensor], clock: int, source: str) -> None:
    """Goes on from what :func:`state_of` told, of the same blocks on any cut, after ``clock`` microbatches.

    The numbers of a stage become the least of its blocks': the loss scale that none of them overflowed with.

    Raises:
        DataError: it is another network's, or another optimizer's.
    """
    parts: dict[str, dict[str, State]] = {}
    for key, value in state.items():
        block, part, name = key.split("/", 2)
        parts.setdefault(block, {}).setdefault(part, {})[name] = value
    weights = {f"{block}.{name}": value for block, found in parts.items() for name, value in found.get("model", {}).items()}
    load_into(pipeline, weights, source)
    method: dict[str, dict[str, Tensor]] = {}
    for j, worker in pipeline.workers.items():
        names = [pipeline.plan.model.blocks[b].name for b in pipeline.plan.layout.stages[j]]
        blocks = []
        for name, module in zip(names, worker.stage.module, strict=True):
            try:
                blocks.append(_block(module, parts[name]))
            except KeyError as error:
                raise DataError(f"{source}: block {name} does not fit (no {error.args[0]})") from error
            for key, value in parts[name].get("method", {}).items():
                parameter, _, kind = key.rpartition("/")
                method.setdefault(kind, {})[f"{name}.{parameter}"] = _like(module.get_parameter(parameter), value)
        numbers = [parts[name]["update"] for name in names]
        least = {key: min(float(n[key]) for n in numbers) for key in numbers[0]}
        worker.update.load_state_dict({"stage": {"scale": None, **least}, "blocks": blocks})
        worker.t = clock
        if pipeline.replica:
            worker.stage.zero_gradients()
    pipeline.clock = clock
    pipeline.load_method_state(method)


def write(state: State, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes the states of all processes, each into a file of its own, and waits for the disk; a call of all processes.

    Raises:
        CheckpointException: in every process if one of them could not write.
    """
    with _alone():
        save(state, storage_writer=_Writer(folder), process_group=group, no_dist=not dist.is_initialized())


class _Writer(FileSystemWriter):
    """Fails with the file system's own error: what torch says of it in another process no longer tells where it came from."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise (origin(error) or error) from error


def origin(error: BaseException) -> OSError | None:
    """The error of the file system behind another, however it is wrapped."""
    found: BaseException | None = within(error)
    while found is not None and not (isinstance(found, OSError) and found.strerror):
        found = found.__cause__ or found.__context__
    return found


def read(folder: Path, wanted: Callable[[str], bool]) -> State:
    """The tensors whose keys are wanted, on the CPU; each process reads for itself.

    Raises:
        DataError: a file that can't be read.
    """
    reader = _Reader(folder)
    try:
        entries = reader.read_metadata().state_dict_metadata
        state: State = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in entries.items()
            if wanted(key) and isinstance(entry, TensorStorageMetadata)
        }
        if state:
            with _alone():
                load(state, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # damage has many faces, and one of them is no Exception
        raise DataError(f"{folder}: can't be read as a checkpoint ({first_line(within(error))})") from error
    return state


def network(folder: Path) -> State:
    """The whole network in a checkpoint under the keys of an exported file; moving averages where there are some.

    Raises:
        DataError: a file that can't be read.
    """
    found = read(folder, lambda key: key.split("/")[1] in ("model", "average"))
    state: State = {}
    for part in ("model", "average"):
        for key, value in found.items():
            block, kind, name = key.split("/", 2)
            if kind == part:
                state[f"{block}.{name}"] = value
    return state


def within(error: BaseException) -> BaseException:
    """The first error that a checkpoint's error stands for."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


@contextmanager
def _alone() -> Iterator[None]:
    """Without the warning that there is but one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _block(module: nn.Module, parts: Mapping[str, State]) -> dict[str, Any]:
    """A block's part of :meth:`petra.engine.update.Update.state_dict`."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer: dict[str, State] = {name: {} for name in parameters}
    for key, value in parts.get("optimizer", {}).items():
        name, _, kind = key.rpartition("/")
        optimizer[name][kind] = _like(parameters[name], value)
    parts["update"]
    return {
        "optimizer": optimizer,
        "average": parts.get("average", {}),
        "gradient": {name: parts["gradient"][name] for name in parameters},
    }


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """In the parameter's memory format, on which the last bits of an update may depend."""
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value) if value.shape == parameter.shape else value


class _Reader(FileSystemReader):
    """Unpickles nothing but descriptions of tensors, since a pickle may call any function."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)
