"""Data sets of other libraries as microbatches: order, augmentation, workers, resuming, replicas, and errors."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset

from petra.data import Dataset, EvalSource, Split, TrainSource, from_dataset
from petra.engine.metrics import count_targets
from petra.errors import ConfigError, DataError
from petra.specs import IGNORED
from tests.support.refusals import refuses

COUNT = 23
INPUTS, TARGETS = torch.arange(COUNT * 3).view(COUNT, 3).float(), torch.arange(COUNT) % 5


class Rows(torch.utils.data.Dataset[Any]):
    """Samples with noise from each of the global generators. Records the indices that are read."""

    def __init__(self, noise: bool = False) -> None:
        self.noise, self.read = noise, list[int]()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.read.append(i)
        x = INPUTS[i]
        if self.noise:
            x = x + torch.rand(3) + float(np.random.rand()) + random.random()
        return x, TARGETS[i]


def read(source: TrainSource | EvalSource, numbers: range) -> list[tuple[Tensor, Tensor]]:
    return [(source.inputs(m), source.targets(m)) for m in numbers]


def same(found: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))


def test_microbatches_are_those_of_petras_own_data_sets() -> None:
    """Each sample is read once for inputs and targets, also if the last stage reads later than the first."""
    rows, numbers = Rows(), range(12)  # two and a half epochs
    split, own = from_dataset(rows), Split(COUNT, lambda rows, seed: INPUTS[rows], lambda rows, seed: TARGETS[rows])
    expected = read(TrainSource(own, 5, 3), numbers)
    for workers in (0, 2):
        assert same(read(TrainSource(split, 5, 3, workers=workers), numbers), expected)
    assert same(read(EvalSource(split, 5), range(5)), read(EvalSource(own, 5), range(5)))
    assert EvalSource(split, 5).targets(4).tolist() == [0, 1, 2, -100, -100]
    rows.read.clear()
    source = TrainSource(split, 5, 3)
    late = [source.inputs(m) for m in range(4)]
    assert same(list(zip(late, [source.targets(m) for m in range(4)], strict=True)), expected[:4])
    assert len(rows.read) == len(set(rows.read)) == 20


def test_random_samples_depend_on_seed_and_microbatch_only() -> None:
    """With workers, when targets are read again that are not kept any more, and in the processes of first and last stage."""
    split = from_dataset(Rows(noise=True))
    plain = TrainSource(split, 4, 1)
    reference = read(plain, range(8))
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for workers in (0, 2):
        assert same(read(TrainSource(split, 4, 1, workers=workers), range(5, 8)), reference[5:]), "resumed within an epoch"
    assert torch.equal(state[0], torch.get_rng_state()), "training's own random numbers are unchanged"
    assert state[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    first = TrainSource(split.part(inputs=True, targets=False), 4, 1, workers=1)
    last = TrainSource(split.part(inputs=False, targets=True), 4, 1, workers=1)
    assert same([(first.inputs(m), last.targets(m)) for m in range(7)], reference[:7])
    for m in range(8, 300):
        plain.inputs(m)
    assert same([(plain.inputs(0), plain.targets(1))], [(reference[0][0], reference[1][1])])
    assert not torch.equal(TrainSource(split, 4, 2).inputs(0), reference[0][0])
    fixed = TrainSource(split, COUNT, 1, augment=False)
    epochs = [fixed.inputs(m)[fixed.inputs(m)[:, 0].argsort()] for m in (0, 1)]
    assert torch.equal(*epochs), "without augmentation each epoch has the same samples"


def test_replicas_read_their_rows() -> None:
    def mixed(rows: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = torch.utils.data.default_collate(rows)
        return x + torch.rand(1) * x.flip(0), y  # a sample depends on the others of its microbatch

    split = from_dataset(Rows(), mixed)
    whole = TrainSource(split, 6, 0)
    for share in (slice(0, 3), slice(3, 6)):
        for part in (split, split.part(inputs=True, targets=False)):
            assert torch.equal(TrainSource(part, 6, 0, share=share).inputs(2), whole.inputs(2)[share])
        assert torch.equal(TrainSource(split, 6, 0, share=share).targets(2), whole.targets(2))


class Words(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Broken(Rows):
    def __getitem__(self, i: int) -> Any:
        if i == 7:
            raise FileNotFoundError("no such file: 7.jpg")
        return torch.zeros(i if i == 9 else 3), TARGETS[i]


PAIR = "collate: expected a function that returns the tensors (inputs, targets) for a list of samples, got "


test_wrong_data_sets_are_one_clear_error = refuses(
    lambda make: make(),
    (lambda: from_dataset(Words()), "dataset: expected a map-style data set, with __getitem__ and __len__, got Words"),  # type: ignore[arg-type]
    (lambda: from_dataset(Subset(Rows(), [])), "dataset: expected at least one sample, got none"),
    (lambda: from_dataset([{"text": "a", "label": 1}]), f"{PAIR}<class 'dict'>"),
    (lambda: from_dataset(TensorDataset(INPUTS)), f"{PAIR}['Tensor']"),
    (lambda: from_dataset(Rows(), lambda _: (INPUTS[:2], TARGETS[:1])), "inputs with a row for each of 1 samples, got "),
    (lambda: from_dataset(Rows(), torch.stack), "collate: failed for samples 0 (TypeError: expected Tensor as element 0"),  # type: ignore[arg-type]
    kind=(ConfigError, DataError),
)


def test_samples_that_cannot_be_read_are_named() -> None:
    split = from_dataset(Broken())
    for workers in (0, 1):
        with pytest.raises(DataError, match=r"dataset: sample 7 can't be read \(FileNotFoundError: no such file: 7.jpg\)"):
            EvalSource(split, 4, workers=workers).inputs(1)
    with pytest.raises(DataError, match=r"collate: failed for samples 8, 9, 10, 11 \(RuntimeError: stack expects each tensor"):
        EvalSource(split, 4).inputs(2)


def test_a_part_that_is_both_trained_on_and_tested_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    split = from_dataset(Rows())
    Dataset("rows", 3, 3, split, split)
    assert caplog.messages == ["data: rows is tested on its training samples"]


def test_targets_of_other_forms() -> None:
    """Integers of any type are padded, also if they are not contiguous: numbers that can't be -100, such as bytes, become int64.

    Continuous targets are evaluated in whole microbatches.
    """
    for dtype in (torch.int32, torch.uint8, torch.bool):
        labels = (TARGETS % 2).to(dtype)
        source = EvalSource(from_dataset(TensorDataset(INPUTS, labels)), batch_size=10)
        targets = [source.targets(m) for m in range(source.batches)]
        assert [int(count_targets(t)) for t in targets] == [10, 10, 3]
        assert torch.equal(torch.cat(targets)[:COUNT], labels.long())
    assert int(count_targets(torch.tensor([156, 1], dtype=torch.uint8))) == 2  # 156 is -100 modulo 256

    def collate(rows: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in rows]), torch.stack([torch.stack([t, t]) for _, t in rows], 1).t()

    source = EvalSource(from_dataset(Rows(), collate), batch_size=10)
    assert (source.targets(2) == IGNORED).sum() == 14
    assert torch.equal(EvalSource(from_dataset(TensorDataset(INPUTS, INPUTS)), 1).targets(22), INPUTS[22:])
