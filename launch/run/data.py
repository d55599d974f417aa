"""The data of a run: the first stage's process reads, the last one gets the targets, and the others learn how much there is.

Each replica has a process that reads its share.
"""

from __future__ import annotations

from dataclasses import asdict

import torch.distributed as dist

from launch.config.schema import DataConfig
from petra.data import Dataset, EvalStream, TrainStream, load_dataset, microbatch_form, settings
from petra.distributed import gathered, together
from petra.errors import ConfigError, DataError
from petra.plan.layout import Layout
from petra.specs import TensorSpec

AGREED = ("classes", "size")
"""Keys that every data set has, since the model depends on them; most of them fix the values."""
OWN = ("root", "images", "validation")
"""Keys that some have, null for the others."""


def checked_form(config: DataConfig) -> TensorSpec:
    """The form of a microbatch of inputs, from the configuration alone.

    Raises:
        ConfigError: a value out of range, or a setting that the data set doesn't have.
    """
    own = settings(config.name)
    for key, least, most in (("batch_size", 1, 10**6), ("size", 1, 10**6), ("classes", 1, 10**7), ("workers", 0, 1000)):
        if not least <= getattr(config, key) <= most:
            raise ConfigError(f"data.{key}: found {getattr(config, key)}, accepted are integers >= {least}, at most {most}")
    for key in OWN:
        if getattr(config, key) is not None and key not in own:
            raise ConfigError(f"data.{key}: found {getattr(config, key)}, accepted are null for {config.name}")
    return microbatch_form(config.name, config.batch_size, config.size)


def streams(config: DataConfig, seed: int, layout: Layout) -> tuple[TrainStream, EvalStream]:
    """For training and for testing; a call of all processes together.

    Only the first stage's process opens files, so only its machine needs them; of replicas that of each.

    Raises:
        PetraError: the data set can't be used, or replicas have different ones; in every process.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    replica, place = layout.place(rank)
    with together():
        loaded = _load(config) if place == 0 else None
    last = sum(bool(stages) for stages in layout.processes) - 1
    dataset = _shared(loaded, rank, first=rank - place, last=rank - place + last)
    rows = layout.inputs.shape[0]
    share = slice(replica * rows, (replica + 1) * rows)
    return (
        TrainStream(dataset, config.batch_size, seed, config.augment, config.workers, share),
        EvalStream(dataset, config.batch_size, config.workers, share),
    )


def _load(config: DataConfig) -> Dataset:
    wanted = {key: value for key, value in asdict(config).items() if key in AGREED + OWN and value is not None}
    dataset = load_dataset(config.name, **{key: value for key, value in wanted.items() if key in settings(config.name)})
    for key in AGREED:
        if getattr(dataset, key) != wanted[key]:
            raise ConfigError(f"data.{key}: found {wanted[key]}, accepted is {getattr(dataset, key)} for {dataset.name}")
    return dataset


def _shared(loaded: Dataset | None, rank: int, first: int, last: int) -> Dataset:
    """Each process's part of what the ``first`` one of its line has loaded."""
    outlines: list[Dataset | None] = gathered(None if loaded is None else loaded.part())
    outline = outlines[0]
    assert outline is not None
    for other, found in enumerate(outlines):
        if found is not None and _counts(found) != _counts(outline):
            raise DataError(
                f"data.root: found {_counts(found)} in process {other}, accepted are {_counts(outline)} as in process 0"
            )
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
    return f"{dataset.train.count} samples for training and {dataset.test.count} for testing"
