"""The data of a run: the rank of the first stage reads the data set, and the rank of the last stage receives the targets.

With replicas, the rank of each replica's first stage reads the replica's share. All other ranks get only the number of samples.
"""

from __future__ import annotations

from dataclasses import asdict

import torch.distributed as dist

from petra.data import Dataset, EvalSource, TrainSource, load_dataset, microbatch_form, settings
from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.errors import DataError, invalid, require
from petra.plan.layout import Layout
from petra.specs import TensorSpec

from ..config.schema import DataConfig

REQUIRED = ("classes", "size")
"""Keys that every data set has, because the model depends on them. Most data sets fix their values."""
OPTIONAL = ("root", "images", "validation", "mean_image", "distort")
"""Keys that only some data sets have. They are null for the others."""


def checked_form(config: DataConfig) -> TensorSpec:
    """Return shape and dtype of a microbatch of inputs, from the configuration alone.

    Raises:
        ConfigError: If a key is set that the data set doesn't have.
    """
    own = settings(config.name)
    for key in OPTIONAL:
        value = getattr(config, key)
        require(value is None or key in own, f"data.{key}", f"null for {config.name}", value)
    return microbatch_form(config.name, config.batch_size, config.size)


def data_sources(config: DataConfig, seed: int, layout: Layout) -> tuple[TrainSource, EvalSource]:
    """Return the data sources for training and for evaluation. Every rank must call this function.

    In each replica, only the rank of the first stage opens files, so only its machine needs them.

    Raises:
        PetraError: If the data set can't be used, or replicas have different data sets. Raised on every rank.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    replica, process = layout.locate(rank)
    with raise_on_all_ranks():
        loaded = _load(config) if process == 0 else None
    last = sum(bool(stages) for stages in layout.processes) - 1
    dataset = _distribute(loaded, rank, first=rank - process, last=rank - process + last)
    rows = layout.inputs.shape[0]
    share = slice(replica * rows, (replica + 1) * rows)
    return (
        TrainSource(dataset, config.batch_size, seed, config.augment, config.workers, share),
        EvalSource(dataset, config.batch_size, config.workers, share),
    )


def _load(config: DataConfig) -> Dataset:
    wanted = {key: value for key, value in asdict(config).items() if key in REQUIRED + OPTIONAL and value is not None}
    dataset = load_dataset(config.name, **{key: value for key, value in wanted.items() if key in settings(config.name)})
    for key in REQUIRED:
        fixed = getattr(dataset, key)
        require(fixed == wanted[key], f"data.{key}", f"{fixed} for {dataset.name}", wanted[key])
    return dataset


def _distribute(loaded: Dataset | None, rank: int, first: int, last: int) -> Dataset:
    """Return this rank's part of the data set: inputs on rank ``first`` of the replica, targets on rank ``last``.

    Args:
        loaded: The data set, on rank ``first`` of each replica.
        rank: Rank of this process.
        first: Rank of the replica's first stage.
        last: Rank of the replica's last stage.
    """
    outlines: list[Dataset | None] = all_gather_objects(None if loaded is None else loaded.part())
    outline = outlines[0]
    assert outline is not None
    for other, found in enumerate(outlines):
        if found is not None and _counts(found) != _counts(outline):
            raise invalid("data.root", f"{_counts(outline)} as on rank 0", f"{_counts(found)} on rank {other}", DataError)
    if last == first:
        return loaded or outline
    if loaded is not None:
        dist.send_object_list([loaded.part(targets=True)], dst=last)
        return loaded.part(inputs=True)
    if rank == last:
        received = [outline]
        dist.recv_object_list(received, src=first)
        outline = received[0]
    return outline


def _counts(dataset: Dataset) -> str:
    return f"{dataset.train.count} training samples and {dataset.test.count} test samples"
