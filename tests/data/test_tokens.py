"""Files of tokens: windows against slices of NumPy arrays, three file formats, and damaged files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from petra.data import TrainSource, load_dataset
from petra.errors import ConfigError, DataError, PetraError

SIZE, CLASSES = 5, 300


def write_llmc(path: Path, tokens: np.ndarray) -> None:
    """Write a file as llm.c does: a header of 256 integers, then the tokens."""
    magic, version = {2: (20240520, 1), 4: (20240801, 7)}[tokens.dtype.itemsize]
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())


def write_nanogpt(path: Path, tokens: np.ndarray) -> None:
    """Write a file as nanoGPT does: nothing but the tokens."""
    path.write_bytes(tokens.tobytes())


@pytest.fixture
def arrays() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, CLASSES, n).astype("<u2") for n in (23, 1, 41, 12)]


def make_folder(folder: Path, arrays: list[np.ndarray], write: object = write_llmc) -> Path:
    """Write three files for training, the second too short for a window, and one for testing."""
    for i, tokens in enumerate(arrays[:3]):
        write(folder / f"text_train_{i:06}.bin", tokens)
    write(folder / "text_val_000000.bin", arrays[3])
    return folder


def write_corpus(folder: Path, **parts: object) -> None:
    """Write the facts of the files of make_folder, with other values of the given parts."""
    facts = {"classes": CLASSES, "train": {"tokens": 65, "bytes": 130}, "val": {"tokens": 12, "bytes": 42}}
    (folder / "corpus.json").write_text(json.dumps({**facts, **parts}))


@pytest.mark.parametrize("kind", ["uint16", "uint32", "nanogpt"])
def test_windows_are_slices_of_the_files(kind: str, arrays: list[np.ndarray], tmp_path: Path) -> None:
    written = [tokens.astype("<u4") for tokens in arrays] if kind == "uint32" else arrays
    data = load_dataset(
        "tokens",
        root=make_folder(tmp_path, written, write_nanogpt if kind == "nanogpt" else write_llmc),
        size=SIZE,
        classes=CLASSES,
    )
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


def test_augmentation_moves_windows_within_their_file(arrays: list[np.ndarray], tmp_path: Path) -> None:
    data = load_dataset("tokens", root=make_folder(tmp_path, arrays), size=SIZE, classes=CLASSES)
    slices = {
        tuple(tokens[start : start + SIZE + 1].tolist()) for tokens in arrays[:3] for start in range(max(len(tokens) - SIZE, 0))
    }
    seen = set()
    for seed in range(40):
        rows = torch.arange(data.train.count)
        inputs, targets = data.train.inputs(rows, seed), data.train.targets(rows, seed).view(-1, SIZE)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        seen |= {(*x.tolist(), y[-1].item()) for x, y in zip(inputs, targets, strict=True)}
    assert seen == slices


def test_windows_of_an_epoch_do_not_depend_on_the_batch_size(arrays: list[np.ndarray], tmp_path: Path) -> None:
    data = load_dataset("tokens", root=make_folder(tmp_path, arrays), size=SIZE, classes=CLASSES)
    count = data.train.count
    single, pairs = TrainSource(data, 1, seed=2), TrainSource(data, 2, seed=2)
    for read in (TrainSource.inputs, TrainSource.targets):
        ones = torch.cat([read(single, m) for m in range(count // 2 * 2)])
        twos = torch.cat([read(pairs, m) for m in range(count // 2)])
        assert torch.equal(ones, twos)


def test_a_dataset_in_another_process_reads_the_same(arrays: list[np.ndarray], tmp_path: Path) -> None:
    """A pickled data set contains paths, not tokens."""
    data = load_dataset("tokens", root=make_folder(tmp_path, arrays), size=SIZE, classes=CLASSES)
    expected = TrainSource(data, 3, seed=1).targets(7)  # maps the files
    pickled = pickle.dumps(data)
    assert arrays[2].tobytes() not in pickled
    assert torch.equal(TrainSource(pickle.loads(pickled), 3, seed=1).targets(7), expected)


def test_bytes_per_token_come_from_the_corpus(arrays: list[np.ndarray], tmp_path: Path) -> None:
    folder = make_folder(tmp_path, arrays)
    assert load_dataset("tokens", root=folder, size=SIZE, classes=CLASSES).bytes_per_target is None
    write_corpus(folder)
    assert load_dataset("tokens", root=folder, size=SIZE, classes=CLASSES).bytes_per_target == 3.5
    with pytest.raises(ConfigError, match=rf"data\.classes: expected {CLASSES}, the tokens of .*corpus\.json, got 99"):
        load_dataset("tokens", root=folder, size=SIZE, classes=99)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a_val.bin", b"\0" * 7, r"a_val\.bin: expected a whole number of uint16 tokens, got 7 bytes"),
        ("a_val.bin", b"\0\0", r"\*val\*\.bin: expected files with at least 2 tokens, got 1"),
        ("a_val.bin", None, r"\*val\*\.bin: expected files with at least 2 tokens, got none"),
        (
            "a_val.bin",
            np.array([20240520, 3, 4, *[0] * 253], "<i4").tobytes(),
            r"a_val\.bin: expected version 1 of llm\.c's format, got 3",
        ),
        (
            "a_val.bin",
            np.array([20240520, 1, 4, *[0] * 253], "<i4").tobytes(),
            r"a_val\.bin: expected 4 tokens, as its header says, got 0",
        ),
        ("corpus.json", b"{", r"corpus\.json: can't be read"),
    ],
)
def test_damaged_files(name: str, content: bytes | None, message: str, arrays: list[np.ndarray], tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "train.bin", arrays[0])
    write_nanogpt(tmp_path / "a_val.bin", arrays[3])
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PetraError, match=message):
        load_dataset("tokens", root=tmp_path, size=SIZE, classes=CLASSES)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": {"tokens": 10**9, "bytes": 130}}, r"\*train\*\.bin: expected 1000000000 tokens, as in corpus\.json, got 65"),
        ({"val": {"tokens": 11, "bytes": 42}}, r"\*val\*\.bin: expected 11 tokens, as in corpus\.json, got 12"),
        ({"val": {"tokens": 0, "bytes": 42}}, r"corpus\.json, val\.tokens: expected an integer > 0, got 0"),
        ({"val": {"tokens": 12, "bytes": 0}}, r"corpus\.json, val\.bytes: expected an integer > 0, got 0"),
        ({"val": {"tokens": 12, "bytes": -5}}, r"corpus\.json, val\.bytes: expected an integer > 0, got -5"),
        ({"val": {"tokens": 12, "bytes": float("nan")}}, r"corpus\.json, val\.bytes: expected an integer > 0, got nan"),
        ({"val": {"tokens": 12, "bytes": float("inf")}}, r"corpus\.json, val\.bytes: expected an integer > 0, got inf"),
        ({"train": None}, r"corpus\.json, train\.tokens: expected an integer > 0, got None"),
    ],
)
def test_counts_of_the_corpus_are_those_of_its_files(
    parts: dict[str, object], message: str, arrays: list[np.ndarray], tmp_path: Path
) -> None:
    write_corpus(make_folder(tmp_path, arrays), **parts)
    with pytest.raises(DataError, match=message):
        load_dataset("tokens", root=tmp_path, size=SIZE, classes=CLASSES)


def test_a_lost_file_of_tokens_is_an_error(arrays: list[np.ndarray], tmp_path: Path) -> None:
    write_corpus(make_folder(tmp_path, arrays))
    (tmp_path / "text_train_000000.bin").unlink()
    with pytest.raises(DataError, match=r"\*train\*\.bin: expected 65 tokens, as in corpus\.json, got 42"):
        load_dataset("tokens", root=tmp_path, size=SIZE, classes=CLASSES)


def damage(path: Path, keep: int, flip: bool) -> None:
    """Cut a file, and flip a bit of its magic number."""
    content = bytearray(path.read_bytes()[:keep])
    content[1] ^= flip << 4
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["<u2", "<u4"])
@pytest.mark.parametrize("corpus", [False, True])
@pytest.mark.parametrize(
    ("keep", "flip", "found"),
    [(1 << 20, True, "(a header with )?another magic number"), (1000, False, "1000 bytes"), (200, False, "200 bytes")],
)
def test_a_damaged_header_is_not_read_as_tokens(
    keep: int, flip: bool, found: str, corpus: bool, kind: str, arrays: list[np.ndarray], tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, [tokens.astype(kind) for tokens in arrays])
    if corpus:
        write_corpus(folder)
    damage(folder / "text_val_000000.bin", keep, flip)
    with pytest.raises(DataError, match=rf"text_val_000000\.bin: expected .*the header of llm\.c.*, got {found}"):
        load_dataset("tokens", root=folder, size=SIZE, classes=CLASSES)


@pytest.mark.parametrize("kind", ["<i4", "<i8"])
@pytest.mark.parametrize("corpus", [False, True])
def test_wide_integers_without_a_header_are_refused(corpus: bool, kind: str, arrays: list[np.ndarray], tmp_path: Path) -> None:
    folder = make_folder(tmp_path, arrays)
    if corpus:
        write_corpus(folder)
    write_nanogpt(folder / "text_val_000000.bin", arrays[3].astype(kind))
    with pytest.raises(DataError, match=r"text_val_000000\.bin: expected .*the header of llm\.c"):
        load_dataset("tokens", root=folder, size=SIZE, classes=CLASSES)


def test_nanogpt_files_with_many_zeros_are_read(tmp_path: Path) -> None:
    for content in (np.zeros(600, "<u2"), np.tile(np.array([0, 5], "<u2"), 300), np.array([7, 0, 3, 0], "<u2")):
        write_nanogpt(tmp_path / "train.bin", np.zeros(600, "<u2"))
        write_nanogpt(tmp_path / "val.bin", content)
        data = load_dataset("tokens", root=tmp_path, size=SIZE, classes=CLASSES)
        assert data.test.inputs(torch.tensor([0]), None)[0, :4].tolist() == content[:4].tolist()


def test_tokens_outside_the_vocabulary_are_refused(arrays: list[np.ndarray], tmp_path: Path) -> None:
    arrays[3][2] = 299
    data = load_dataset("tokens", root=make_folder(tmp_path, arrays), size=SIZE, classes=299)
    with pytest.raises(DataError, match=r"text_val_000000\.bin: expected tokens less than 299 \(data\.classes\), got 299"):
        data.test.inputs(torch.tensor([0]), None)


def test_a_file_of_both_splits_is_refused(arrays: list[np.ndarray], tmp_path: Path) -> None:
    make_folder(tmp_path, arrays)
    write_llmc(tmp_path / "retrieval_train.bin", arrays[0])
    with pytest.raises(DataError, match=r'retrieval_train\.bin: expected a name with "train" or "val", not with both'):
        load_dataset("tokens", root=tmp_path, size=SIZE, classes=CLASSES)


def test_the_test_part_is_read_when_asked(arrays: list[np.ndarray], tmp_path: Path) -> None:
    folder = make_folder(tmp_path, arrays)
    with pytest.raises(DataError, match=r"\*test\*\.bin: expected files with at least 2 tokens, got none"):
        load_dataset("tokens", root=folder, size=SIZE, classes=CLASSES, split="test")
    before = load_dataset("tokens", root=folder, size=SIZE, classes=CLASSES)
    write_llmc(folder / "text_test_000000.bin", arrays[0])
    write_corpus(folder, test={"tokens": 23, "bytes": 46})
    for split, tokens, ratio in (("val", arrays[3], 3.5), ("test", arrays[0], 2.0)):
        data = load_dataset("tokens", root=folder, size=SIZE, classes=CLASSES, split=split)
        assert data.train.count == before.train.count
        assert data.test.inputs(torch.arange(data.test.count), None).flatten()[: len(tokens)].tolist() == tokens.tolist()
        assert data.bytes_per_target == ratio
    with pytest.raises(ConfigError, match=r"data\.split: expected val or test, got train"):
        load_dataset("tokens", root=folder, size=SIZE, classes=CLASSES, split="train")


@pytest.mark.parametrize("name", ["contest_train.bin", "interval_test.bin"])
def test_a_file_of_the_test_part_and_another_is_refused(name: str, arrays: list[np.ndarray], tmp_path: Path) -> None:
    make_folder(tmp_path, arrays)
    write_llmc(tmp_path / name, arrays[0])
    with pytest.raises(DataError, match=rf'{name}: expected a name with "(train|val)" or "test", not with both'):
        load_dataset("tokens", root=tmp_path, size=SIZE, classes=CLASSES)
