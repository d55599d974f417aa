"""Files of tokens: windows against slices of NumPy arrays. Damaged files: test_bad_inputs.py."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petra.data import Dataset, TrainSource, load_dataset
from petra.errors import PetraError

SIZE, CLASSES = 5, 300
VAL = "text_val_000000.bin"


def write_llmc(path: Path, tokens: np.ndarray) -> None:
    """Write a file as llm.c does: a header of 256 integers, then the tokens."""
    magic, version = {2: (20240520, 1), 4: (20240801, 7)}[tokens.dtype.itemsize]
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())


@pytest.fixture
def arrays() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, CLASSES, n).astype("<u2") for n in (23, 1, 41, 12)]


@pytest.fixture
def folder(arrays: list[np.ndarray], tmp_path: Path) -> Path:
    return make_folder(tmp_path, arrays)


def make_folder(folder: Path, arrays: list[np.ndarray]) -> Path:
    """Write three files for training, the second too short for a window, and one for testing."""
    for i, tokens in enumerate(arrays[:3]):
        write_llmc(folder / f"text_train_{i:06}.bin", tokens)
    write_llmc(folder / VAL, arrays[3])
    return folder


def load(folder: Path, **options: Any) -> Dataset:
    return load_dataset("tokens", **{"root": folder, "size": SIZE, "classes": CLASSES, **options})


def refused(message: str, folder: Path, **options: Any) -> None:
    with pytest.raises(PetraError, match=message):
        load(folder, **options)


@pytest.mark.parametrize("kind", ["<u2", "<u4"])
def test_windows_are_slices_of_the_files(kind: str, arrays: list[np.ndarray], tmp_path: Path) -> None:
    data = load(make_folder(tmp_path, [tokens.astype(kind) for tokens in arrays]))
    starts = [(arrays[0], 5 * i) for i in range(4)] + [(arrays[2], 5 * i) for i in range(8)]
    assert data.train.count == len(starts)
    order = torch.randperm(len(starts))
    inputs, targets = data.train.inputs(order, None), data.train.targets(order, None).view(-1, SIZE)
    for row, index in enumerate(order):
        tokens, start = starts[index]
        assert inputs[row].tolist() == tokens[start : start + SIZE].tolist()
        assert targets[row].tolist() == tokens[start + 1 : start + SIZE + 1].tolist()
    rows = torch.arange(data.test.count)
    assert data.test.inputs(rows, None).flatten()[:12].tolist() == arrays[3].tolist()
    assert data.test.targets(rows, None).tolist() == [*arrays[3][1:].tolist(), *[-100] * 4]


def test_augmentation_moves_windows_within_their_file(arrays: list[np.ndarray], folder: Path) -> None:
    """And does not depend on the batch size."""
    data = load(folder)
    slices = {
        tuple(tokens[start : start + SIZE + 1].tolist()) for tokens in arrays[:3] for start in range(max(len(tokens) - SIZE, 0))
    }
    seen, rows = set(), torch.arange(data.train.count)
    for seed in range(40):
        inputs, targets = data.train.inputs(rows, seed), data.train.targets(rows, seed).view(-1, SIZE)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        seen |= {(*x.tolist(), y[-1].item()) for x, y in zip(inputs, targets, strict=True)}
    assert seen == slices
    single, pairs = TrainSource(data, 1, seed=2), TrainSource(data, 2, seed=2)
    assert torch.equal(torch.cat([single.targets(m) for m in range(12)]), torch.cat([pairs.targets(m) for m in range(6)]))


def test_the_corpus_has_facts_of_each_part(arrays: list[np.ndarray], folder: Path) -> None:
    """Bytes per token, the number of classes, and a test part that is read when asked."""
    refused(r"\*test\*\.bin: expected files with at least 2 tokens, got none", folder, split="test")
    before = load(folder)
    assert before.bytes_per_target is None
    write_llmc(folder / "text_test_000000.bin", arrays[0][1:])
    facts = {
        part: {"tokens": tokens, "bytes": size} for part, tokens, size in (("train", 65, 130), ("val", 12, 42), ("test", 22, 44))
    }
    (folder / "corpus.json").write_text(json.dumps({"classes": CLASSES, **facts}))
    for split, tokens, ratio in (("val", arrays[3], 3.5), ("test", arrays[0][1:], 2.0)):
        data = load(folder, split=split)
        assert data.train.count == before.train.count
        assert data.test.inputs(torch.arange(data.test.count), None).flatten()[: len(tokens)].tolist() == tokens.tolist()
        assert data.bytes_per_target == ratio
    refused(rf"data\.classes: expected {CLASSES}, the tokens of .*corpus\.json, got 99", folder, classes=99)
    refused(r"data\.split: expected val or test, got train", folder, split="train")


def test_files_that_are_left_out_are_named(arrays: list[np.ndarray], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_llmc(folder / "Training_4.BIN", arrays[0])
    write_llmc(folder / "retrained_test_0.bin", arrays[1])
    load(folder)
    assert caplog.messages == [
        f"{folder}: left out 1 files without the word train in their names, such as Training_4.BIN",
        f"{folder}: left out 1 files of less than 6 tokens, such as text_train_000001.bin",
    ]


def test_another_machine_has_the_same_files(arrays: list[np.ndarray], folder: Path) -> None:
    """The first stage sends the paths to the last one."""
    sent = pickle.dumps(load(folder).part(targets=True))
    assert len(pickle.loads(sent).train.targets(torch.arange(3), None)) == 3 * SIZE
    write_llmc(folder / "text_train_000000.bin", arrays[0][::-1])
    with pytest.raises(PetraError, match=r"text_train_000000\.bin: expected the contents that the file has on the first machine"):
        pickle.loads(sent).train.targets(torch.arange(3), None)


def test_windows_of_an_epoch_have_different_shifts(tmp_path: Path) -> None:
    """Tokens are their positions, so a window's first token tells its shift."""
    folder = make_folder(tmp_path, [np.arange(201 - i, dtype="<u2") for i in range(4)])
    data = load_dataset("tokens", root=folder, size=SIZE, classes=CLASSES)
    starts = data.train.inputs(torch.arange(30), 3)[:, 0]
    assert len({*(starts % SIZE).tolist()}) == SIZE
