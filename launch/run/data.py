"""The data of a run: the rank of the first stage reads the data set, and the rank of the last stage receives the targets.

With replicas, the rank of each replica's first stage reads the replica's share. All other ranks get only the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from petra.data import DECODED, Dataset, EvalSource, TrainSource, microbatch_form
from petra.data.map_style import seeded_generators
from petra.data.prefetch import TIMEOUT
from petra.distributed import all_gather_objects, message_group, raise_on_all_ranks
from petra.errors import DataError, invalid, require
from petra.inplace_abn import PIXEL_DATASETS
from petra.plan.layout import Layout
from petra.specs import TensorSpec

from ..config.keys import is_shipped
from ..config.schema import AUTO, DataConfig
from .targets import built, imported

MOST_NAMES = 12
"""Most names of classes in an error."""
_own: dict[tuple[Callable[..., Any], str], Dataset] = {}
"""The data set outside the package that was loaded last, by its function and configuration: its form is read before its data."""


def describe_inputs(config: DataConfig) -> tuple[TensorSpec, bool]:
    """Return the form of a microbatch of inputs, and whether inputs are fetched a second time instead of being stored.

    Only a data set outside the package is loaded.

    Raises:
        ConfigError: If its inputs are not a tensor with a row for each sample.
    """
    if is_shipped(config._target_):
        spec = microbatch_form(config.name, config.batch_size, config.size, config.options.get("height"))
        cheap = config.name not in DECODED
    else:
        dataset = load(config)
        read, cheap = dataset.train.inputs, dataset.train.in_memory
        sample = None if read is None else read(torch.tensor([0]), None)
        if not isinstance(sample, torch.Tensor) or sample.shape[:1] != (1,):
            expected = f"a data set whose inputs are tensors with a row for each sample ({dataset.name})"
            raise invalid("data._target_", expected, sample)
        spec = TensorSpec((config.batch_size, *sample.shape[1:]), sample.dtype)
    return spec, cheap if config.refetch == AUTO else config.refetch


def unit_of(config: DataConfig, inputs: TensorSpec) -> str:
    """Return the unit in which the targets of inputs of a form are counted: ``images``, ``tokens`` or ``pixels``."""
    return "tokens" if not inputs.dtype.is_floating_point else "pixels" if config.name in PIXEL_DATASETS else "images"


def data_sources(
    config: DataConfig, seed: int, layout: Layout, timeout: float = TIMEOUT, replicas: Sequence[int] | None = None
) -> tuple[TrainSource, EvalSource]:
    """Return the data sources for training and for evaluation. Every rank must call this function.

    In each replica, only the rank of the first stage opens files, so only its machine needs them. A data set outside the package
    is loaded on all ranks, because its readers may be functions that can't be sent.

    Args:
        timeout: Seconds to wait for a microbatch from a worker process.
        replicas: Indices of the replicas that take part, in the order of their ranks; None for all. If some take no part, the
            source for evaluation returns whole microbatches, because the others evaluate their shares.

    Raises:
        PetraError: If the data set can't be used, or replicas have different data sets. Raised on every rank.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    position, process = layout.locate(rank)
    replica = position if replicas is None else replicas[position]
    with raise_on_all_ranks():
        loaded = load(config) if process == 0 or not is_shipped(config._target_) else None
    last = sum(bool(stages) for stages in layout.processes) - 1
    dataset = _distribute(loaded, rank, first=rank - process, last=rank - process + last)
    rows = layout.inputs.shape[0]
    share = slice(replica * rows, (replica + 1) * rows)
    complete = replicas is None or len(replicas) == layout.dp
    test = EvalSource(dataset, config.batch_size, config.workers, share if complete else slice(None), timeout)
    test.unit = unit_of(config, layout.inputs)
    return TrainSource(dataset, config.batch_size, seed, config.augment, config.workers, share, timeout), test


def load(config: DataConfig) -> Dataset:
    """Load the data set, and check the keys that the model depends on, of which most data sets fix the values."""
    wanted, entry = {"classes": config.classes, "size": config.size}, (imported("data._target_", config._target_), repr(config))
    if entry in _own:
        return _own[entry]
    with seeded_generators(0):  # a random split is the same in all processes, and in a later evaluation
        dataset = built(Dataset, "data", config, **wanted)
    for key, value in wanted.items():
        fixed, names = getattr(dataset, key), getattr(dataset.preparation, key, ())
        listed = f" ({', '.join(names[:MOST_NAMES])}{', …' * (len(names) > MOST_NAMES)})" if key == "classes" and names else ""
        require(fixed == value, f"data.{key}", f"{fixed} for {dataset.name}{listed}", value)
    if not is_shipped(config._target_):
        _own.clear()
        _own[entry] = dataset
    return dataset


def _identity(dataset: Dataset) -> str:
    """Return what a data set must have in common on all ranks that load it."""
    counts = f"{dataset.train.count} training samples and {dataset.test.count} test samples"
    known = {"contents": dataset.contents, "vocabulary": dataset.vocabulary}
    return counts + "".join(f", {name} {value}" for name, value in known.items() if value is not None)


def _distribute(loaded: Dataset | None, rank: int, first: int, last: int) -> Dataset:
    """Return this rank's part of the data set: inputs on rank ``first`` of the replica, targets on rank ``last``.

    Args:
        loaded: The data set, on the ranks of the first stages, or on all ranks.
    """
    outlines: list[Dataset | None] = all_gather_objects(None if loaded is None else loaded.part())
    outline, group = outlines[0], message_group()
    assert outline is not None
    counts = [found and _identity(found) for found in outlines]
    for other, count in enumerate(counts):
        require(count in (None, counts[0]), "data.root", f"{counts[0]} as on rank 0", f"{count} on rank {other}", DataError)
    if last == first or None not in outlines:
        return loaded or outline
    if loaded is not None:
        dist.send_object_list([loaded.part(targets=True)], last, group)
        return loaded.part(inputs=True)
    received = [outline]
    if rank == last:
        dist.recv_object_list(received, first, group)
    return received[0]
