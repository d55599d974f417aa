"""Files that can be read, but are not what was meant: refused in one line that names them, or named in a warning."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import petra.inplace_abn  # noqa: F401 (adds data sets)
from launch import tokenize
from petra.data import EvalSource, TrainSource, load_dataset
from petra.data.imagenet import cropped
from petra.errors import DataError, PetraError
from petra.inplace_abn.label_maps import read_image
from tests.data.test_tokens import write_llmc
from tests.support.commands import refused
from tests.support.fakes import smooth_image, write_image_folders
from tests.support.refusals import refuses

Change = Callable[[Path], object]
WORDS = np.random.default_rng(0).integers(0, 300, (4, 3000)).astype("<u2")
TEXT = "Some text, and more of it. " * 60


def write(name: str, content: bytes | str) -> Change:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def copy(old: str, new: str) -> Change:
    return lambda folder: (shutil.copytree if (folder / old).is_dir() else shutil.copy)(folder / old, folder / new)


def move(old: str, new: str) -> Change:
    return lambda folder: (folder / old).rename(folder / new)


def link(new: str, old: str) -> Change:
    """Replace a file or a folder by a link."""
    return lambda folder: ((folder / new).rename(folder / f".{new}".replace("/", "-")), (folder / new).symlink_to(folder / old))


def pipe(name: str) -> Change:
    return lambda folder: ((folder / name).unlink(missing_ok=True), os.mkfifo(folder / name))


def tokens(name: str, words: np.ndarray) -> Change:
    return lambda folder: write_llmc(folder / name, words)


def header(*numbers: int) -> bytes:
    return np.array([*numbers, *[0] * (256 - len(numbers))], "<i4").tobytes()


def labels(mode: str, size: tuple[int, int], value: int = 0) -> Change:
    return lambda folder: Image.new(mode, size, value).save(folder / "labels/train/a.png")


def corpus(**facts: object) -> Change:
    known = {"classes": 300, "train": {"tokens": 3000, "bytes": 9000}, "val": {"tokens": 3000, "bytes": 9000}}
    return write("corpus.json", json.dumps({**known, **facts}))


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def write_pixels(folder: Path) -> None:
    for part, name in (("train", "a"), ("val", "b")):
        for kind, image in (("images", smooth_image(16, 16)), ("labels", Image.new("L", (16, 16)))):
            (folder / kind / part).mkdir(parents=True)
            image.save(folder / kind / part / f"{name}.png")


def write_tokens(folder: Path) -> None:
    for name, words in zip(("train.bin", "val.bin"), WORDS, strict=False):
        write_llmc(folder / name, words)


def load(name: str, folder: Path) -> object:
    """Write a data set that is accepted, and return what reads it."""
    options = {"tokens": {"size": 4, "classes": 300}, "text": {"size": 16, "root": folder / "a.txt"}, "imagenet": {"size": 16}}
    data = load_dataset(name, **{"root": folder, **options.get(name, {"size": 16})})
    data.train.inputs(torch.arange(1), None)
    data.train.targets(torch.arange(1), None)
    return f"read {data.train.count}"


def upright(name: str) -> Change:
    """Mark an image as turned, as a phone does."""

    def change(folder: Path) -> None:
        image = Image.open(folder / name)
        exif = image.getexif()
        exif[0x0112] = 6
        image.save(folder / name, exif=exif)

    return change


WRITE: dict[str, Change] = {
    "tokens": write_tokens,
    "text": write("a.txt", TEXT),
    "imagenet": write_image_folders,
    "segmentation": write_pixels,
}
SAME_PIXELS = both(*(link(f"{kind}/val", f"{kind}/train") for kind in ("images", "labels")))
OTHER = "expected other contents than any other file of the data, got those of"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokens", link("val.bin", "train.bin"), rf"val\.bin: {OTHER} train\.bin"),
        ("tokens", copy("train.bin", "train (1).bin"), rf"train\.bin: {OTHER}"),
        ("tokens", tokens("train.bin", np.zeros(5000, "<u2")), r"train\.bin: expected different low bytes .*, got 0 1024 "),
        ("tokens", tokens("val.bin", WORDS[1].byteswap() & 0xFF00), r"val\.bin: expected .*, got 0 1024 times .* or big-endian"),
        ("tokens", tokens("val.bin", WORDS[1].astype("<u4")), "expected files of tokens of one type, got uint16 and uint32"),
        ("tokens", write("val.bin", header(20240520, 1, 2) + bytes(5)), r"2 tokens, .* got 2\.5"),
        *(
            ("tokens", write("val.bin", content), r"val\.bin: expected the header of llm\.c, 1024 bytes, got another magic number")
            for content in (bytes(7), header(20240521, 1, 4) + bytes(8))
        ),
        ("tokens", write("val.bin", header(20240520, 1, 4)[:200]), r"val\.bin: expected the header of llm\.c, .*, got 200 bytes"),
        ("tokens", write("val.bin", header(20240520, 1, 1) + bytes(2)), r"\*val\*\.bin: expected files with at least 2 .*, got 1"),
        ("tokens", write("val.bin", header(20240520, 3, 4)), r"val\.bin: expected version 1 of llm\.c's format, got 3"),
        ("tokens", write("val.bin", header(20240520, 1, 4)), r"val\.bin: expected 4 tokens, as its header says, got 0"),
        ("tokens", tokens("val_train.bin", WORDS[2]), 'val_train\\.bin: expected a name with "train" or "val", not with both'),
        ("tokens", tokens("val_test.bin", WORDS[2]), 'val_test\\.bin: expected a name with "val" or "test", not with both'),
        ("tokens", tokens("train.bin", WORDS[2] + 300), r"train\.bin: expected tokens less than 300 \(data\.classes\), got"),
        (
            "tokens",
            tokens("val.bin", np.append(WORDS[1], 300).astype("<u2")),
            r"val\.bin: expected tokens less than 300 .*, got 300",
        ),
        ("tokens", write("corpus.json", "{"), r"corpus\.json: can't be read"),
        ("tokens", both(corpus(), tokens("train.bin", WORDS[2][:2000])), "expected 3000 tokens, as in corpus.json, got 2000"),
        ("tokens", corpus(vocabulary=5), r"corpus\.json: expected an integer classes, a text vocabulary"),
        ("tokens", corpus(val={"tokens": 3000, "bytes": 900}), r"corpus\.json, val\.bytes: expected at least 1500, got 900"),
        ("tokens", corpus(files={"train.bin": "0"}), r"train\.bin: expected the contents whose hash is in corpus\.json"),
        ("tokens", tokens("constraints.bin", WORDS[2]), r"^read 749"),  # of no part
        ("tokens", both(move("train.bin", "train_0.bin"), tokens("train_3.bin", WORDS[2])), "train has a number from 1 to 2"),
        ("text", write("a.txt", TEXT.encode("utf-16")), r"a\.txt, line 1: expected text in UTF-8, got a NUL byte"),
        ("text", write("a.txt", f"{TEXT}\n{TEXT}\0"), r"a\.txt, line 2: expected text in UTF-8, got a NUL byte"),
        ("text", write("a.txt", '{"text": "one line of many"}\n' * 99), r"a\.txt: expected text, got JSON \(petra tokenize"),
        ("text", write("a.txt", "version https://git-lfs.github.com/spec/v1\n" * 9), "got a pointer of Git LFS"),
        ("text", write("a.txt", "\n<!DOCTYPE html><p>" + TEXT), "begins like a page of HTML"),
        ("imagenet", both(copy("train/n00", "train/.ipynb_checkpoints"), copy("val/n00", "val/.ipynb_checkpoints")), "^read 12$"),
        ("imagenet", move("train/n00/0.JPEG", "train/n00/0.webp"), r"train: left out 1, such as n00/0\.webp"),
        ("imagenet", pipe("train/n00/0.JPEG"), r"0\.JPEG: expected a file, got a pipe"),
        ("imagenet", link("val", "train"), rf"val/n00/3\.JPEG: {OTHER} train/n00/3\.JPEG"),
        ("imagenet", move("train", "other"), r"train: can't be read \(No such file .*; data\.root is a folder with train/<class>"),
        ("imagenet", both(*(move(f"val/n0{i}", f"n0{i}") for i in range(3))), "2 folders of classes, got 0; .*move the validation"),
        ("segmentation", move("labels/train/a.png", "a.png"), r"train/a\.png: expected a file, which belongs to a\.png, got"),
        ("segmentation", labels("L", (16, 16), 9), r"a\.png: expected labels from 0 to 1, or 255 for pixels to ignore, got 9"),
        ("segmentation", labels("L", (9, 8)), r"a\.png: expected labels of 16x16 pixels, the size of a\.png, got 9x8"),
        ("segmentation", labels("RGB", (16, 16)), r"a\.png: expected labels in one channel of 8 bits \(.*\), got mode RGB"),
        ("segmentation", copy("labels/train/a.png", "labels/train/c.png"), r"c\.png: labels without an image, 1 in all"),
        ("segmentation", write("labels/train/a.png", b"GIF89a"), r"a\.png: can't be read as labels in a PNG file"),
        ("segmentation", write("images/train/a.png", TEXT), r"a\.png: can't be read as a JPEG, PNG or WebP image"),
        ("segmentation", SAME_PIXELS, "expected other images in val than in train"),
        ("segmentation", upright("images/train/a.png"), r"a\.png: expected an image without an EXIF orientation"),
    ],
)
def test_data_sets(name: str, change: Change, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    WRITE[name](tmp_path)
    load(name, tmp_path)
    change(tmp_path)
    try:
        found: object = load(name, tmp_path)
    except DataError as error:
        found = error
    shown = " ".join([str(found), *(record.getMessage() for record in caplog.records)]).replace(f"{tmp_path}/", "")
    assert re.search(message, shown), shown


def vocabularies(folder: Path) -> None:
    from tokenizers import normalizers

    from petra.data.tokenizer import train_vocabulary

    vocabulary = train_vocabulary([TEXT], 300)
    (folder / "strike.json").write_text(vocabulary.to_str().replace("<|endoftext|>", "<s>"))
    (folder / "strike.txt").write_text(f"{TEXT} <s>an old price</s>")
    vocabulary.normalizer = normalizers.Lowercase()
    vocabulary.save(str(folder / "lower.json"))


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (write("a.JSON", '["a", "b"]'), ["a.JSON"], r"a\.JSON: expected text, or a JSON object in each line, got JSON of another"),
        (write("a.dat", '{\n "text": "a"\n}\n{\n "text": "b"\n}\n'), ["a.dat"], r"a\.dat: expected text, or a JSON object in each"),
        (write("a.txt", '[{"text": "a"},\n{"text": "b"}]'), ["a.txt"], r"a\.txt: expected text, or a JSON object in each line"),
        (write("a.json", TEXT), ["a.json"], r"a\.json: expected text, or a JSON object in each line, got a file \*\.json with"),
        (
            write("a.Jsonlines", TEXT),
            ["a.Jsonlines"],
            r'a\.Jsonlines, line 1: expected a JSON object with a string "text", got Some',
        ),
        (write("a.txt", f"\n{TEXT}\n<|endoftext|>"), ["a.txt"], r"a\.txt, line 3: expected text without <\|endoftext\|>"),
        (write("a.txt", b"\r\n\xe9t\xe9"), ["a.txt"], r"a\.txt, line 2: expected text in UTF-8, got the byte 0xe9"),
        (write("a.txt", b"\0" * 99), ["a.txt"], r"a\.txt, line 1: expected text in UTF-8, got a NUL byte"),
        *(
            (
                write("a.dump", f'{{"text": "good"}}\n\n{{"text": "{text}"}}\n'.encode("latin1")),
                ["a.dump"],
                rf"a\.dump, line 3: {found}",
            )
            for text, found in (
                ("\\ud83d", r"expected a text of characters, got '\\ud83d'"),
                ("\\u0000", r"expected a text of characters, got '\\x00'"),
                ("\0", "expected text in UTF-8, got a NUL byte"),
                ("\xe9t\xe9", "expected text in UTF-8, got the byte 0xe9"),
                ("a <|endoftext|>", r"expected text without <\|endoftext"),
                ('a"b', r'expected a JSON object with a string "text", got \{"text": "a"b"\}'),
            )
        ),
        (copy("a.txt", "b.txt"), ["a.txt", "--validation", "b.txt"], rf"b\.txt: {OTHER} a\.txt"),
        (copy("a.txt", "b.txt"), ["a.txt", "--separator", "<end>"], "--separator: expected a text that occurs in the files"),
        (write("out", b""), ["a.txt", "--vocabulary", "none.json"], "--out: expected a folder without"),  # before all else
        (vocabularies, ["a.txt", "--vocabulary", "lower.json"], "expected a vocabulary that gives the text back, got 'some"),
        (vocabularies, ["strike.txt", "--vocabulary", "strike.json"], "val: expected text without <s>, got "),
    ],
)
def test_tokenize(change: Change, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers", reason="the extra 'text' is not installed")
    monkeypatch.chdir(tmp_path)
    write("a.txt", TEXT)(tmp_path)
    change(tmp_path)
    paths = [str(tmp_path / word) if "." in word else word for word in words]
    arguments = [*paths, "--out", str(tmp_path / "out"), *([] if "--vocabulary" in words else ["--vocabulary", "300"])]
    assert re.search(message, refused(tokenize.main, arguments).replace(f"{tmp_path}/", ""))
    assert not [*(tmp_path / "out").glob("*.bin")]


def test_photographs_are_turned_as_viewers_show_them(tmp_path: Path) -> None:
    smooth_image(20, 40).save(tmp_path / "a.png")
    before = cropped(tmp_path / "a.png", 16, None)
    smooth_image(20, 40).transpose(Image.Transpose.ROTATE_90).save(tmp_path / "a.png")
    upright("a.png")(tmp_path)
    assert np.array_equal(cropped(tmp_path / "a.png", 16, None), before)
    with pytest.raises(DataError, match="EXIF"):
        read_image(tmp_path / "a.png")


test_sources = refuses(
    lambda use: use(load_dataset("synthetic", images=64, size=8)),
    (lambda data: TrainSource(data, 4, seed=-1), r"seed: expected an integer >= 0 and < 2\^63, got -1"),
    (lambda data: TrainSource(data, 4, 0, workers=10**5), "data.workers: expected an integer from 0 to 1000, got 100000"),
    (lambda data: TrainSource(data, 4, 0, workers=-1), "data.workers: expected an integer from 0 to 1000, got -1"),
    (lambda data: load_dataset("digits", size=8), "data.size: expected an argument of digits, got another"),
    (lambda data: TrainSource(data, 4, 0).inputs(-1), "microbatch: expected an integer >= 0 and < inf, got -1"),
    (lambda data: TrainSource(data, 4, 0).targets(2.5), "microbatch: expected an integer >= 0 and < inf, got 2.5"),
    (lambda data: EvalSource(data, 4).inputs(4), "microbatch: expected an integer >= 0 and < 4, got 4"),
    (lambda data: TrainSource(data, 4, 0, share=slice(5, 9)).inputs(0), "share: expected some of 4 rows, got slice"),
    kind=PetraError,
)
