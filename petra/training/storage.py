"""Tensors of all processes in one folder, in the format of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import errno
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from petra.errors import DataError, first_line
from petra.training.records import METADATA, file_system_error
from petra.training.weight_files import State

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
"""Names that the metadata may refer to, by module."""


def write(state: State, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the tensors of all processes, one file per process, and sync the files. All processes must call this function.

    Raises:
        OSError: In every process, if any of them could not write.
    """
    try:
        with _no_warning():
            save(state, storage_writer=_Writer(folder), process_group=group, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        failure = _first_failure(error)
        raise file_system_error(failure) or OSError(errno.EIO, first_line(failure)) from error


def read(folder: Path, wanted: Callable[[str], bool]) -> State:
    """Return the tensors whose keys satisfy ``wanted``, on the CPU. Each process reads on its own.

    Raises:
        DataError: If a file cannot be read.
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
            with _no_warning():
                load(state, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # damage raises many types; CheckpointException is a BaseException
        raise DataError(f"{folder}: cannot be read as a checkpoint ({first_line(_first_failure(error))})") from error
    return state


def _first_failure(error: BaseException) -> BaseException:
    """Return the error of the first process that failed, if ``error`` collects those of several."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


@contextmanager
def _no_warning() -> Iterator[None]:
    """Suppress torch's warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


class _Writer(FileSystemWriter):
    """Writer that raises the file system's own error, because torch does not send causes of an error to other processes."""

    def __init__(self, folder: Path) -> None:
        # Copying ahead would use the current CUDA device of this thread, which is GPU 0 in a background thread of every process.
        super().__init__(folder, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise (file_system_error(error) or error) from error


class _Reader(FileSystemReader):
    """Reader that unpickles only descriptions of tensors, because a pickle may call any function."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)
