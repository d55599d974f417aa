"""Token files from text: what is written decodes to the text, and documents are delimited and divided."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from launch.tokenize import main
from petra.data import load_dataset, tokenizer
from petra.data.tokens import open_tokens
from petra.errors import ConfigError, DataError
from tests.support.commands import refused

tokenizers = pytest.importorskip("tokenizers", reason="the extra 'text' is not installed")

TEXTS = [f"Chapter {i}. The naïve café — {'never ' * (i % 7)}again! {i * i}\n" for i in range(40)]


def tokenize(folder: Path, *words: str) -> dict[str, object]:
    """Tokenize TEXTS, a third of them for validation unless the words say otherwise."""
    source = folder / "texts.txt"
    source.write_text("<end>\n".join(TEXTS), encoding="utf-8")
    options = f"--vocabulary 300 --separator <end>\\n --validation 0.3 --out {folder / 'tokens'}".split()
    main([str(source), *options, *words])
    return json.loads((folder / "tokens" / "corpus.json").read_text())


def decoded(folder: Path, split: str) -> list[str]:
    """Return the documents of a split, by tokenizers' own decoder."""
    vocabulary = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    files = [open_tokens(path, 300) for path in sorted(folder.glob(f"{split}_*.bin"))]
    ids = np.concatenate([file[np.arange(len(file))] for file in files])
    starts = np.flatnonzero(ids == 0)
    assert starts[0] == 0
    return [vocabulary.decode(part[1:].tolist()) for part in np.split(ids, starts[1:])]


def test_documents_are_delimited_and_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third part leaves the validation part as it is."""
    monkeypatch.setattr(tokenizer, "SHARD_TOKENS", 400)  # several files
    for name, words in (("two", []), ("three", ["--test", "0.3"])):
        (tmp_path / name).mkdir()
        facts = tokenize(tmp_path / name, *words)
    two, three = (tmp_path / name / "tokens" for name in ("two", "three"))
    assert (two / "val_000000.bin").read_bytes() == (three / "val_000000.bin").read_bytes()
    assert len(list(two.glob("train_*.bin"))) > 1
    assert not [*two.glob("*test*")]
    assert {*facts["files"]} == {path.name for path in three.glob("*.bin")}
    parts = {part: decoded(three, part) for part in ("train", "val", "test")}
    assert sorted(text for texts in parts.values() for text in texts) == sorted(TEXTS)
    for part, texts in parts.items():
        assert 3 <= len(texts) <= 25
        assert (facts[part]["documents"], facts[part]["bytes"]) == (len(texts), sum(len(text.encode()) for text in texts))
    for part in ("val", "test"):
        data = load_dataset("tokens", root=three, size=8, classes=facts["classes"], split=part)
        assert data.bytes_per_target == facts[part]["bytes"] / facts[part]["tokens"]
    assert data.train.inputs(torch.tensor([0]), None)[0, 0] == 0


def test_equal_documents_are_on_one_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, "long " * 9999] * 2))
    main(f"{tmp_path}/a.jsonl --out {tmp_path}/tokens --vocabulary 300 --validation 0.3".split())
    assert not {*decoded(tmp_path / "tokens", "train")} & {*decoded(tmp_path / "tokens", "val")}
    assert re.search(r"warning: val has \d+% of the bytes \(--validation=0\.3\)", capsys.readouterr().out)


def test_files_for_other_parts_and_a_given_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenize(tmp_path)
    for name in ("one", "two", "three"):
        (tmp_path / name).write_text(f"Chapter {name}", encoding="utf-8")
    words = "P/one --validation P/two --test P/three --out P/again --vocabulary P/tokens/tokenizer.json"
    main(words.replace("P/", f"{tmp_path}/").split())
    parts = [decoded(tmp_path / "again", part) for part in ("train", "val", "test")]
    assert parts == [["Chapter one"], ["Chapter two"], ["Chapter three"]]
    assert capsys.readouterr().err == "", "the progress bar is for terminals"


@pytest.mark.parametrize("name", ["a.ndjson", "A.JSONL", "a.jl", "a.json", "a.txt", "documents"])
def test_objects_in_lines_are_recognised_by_their_content(name: str, tmp_path: Path) -> None:
    """Also behind a byte order mark, with other ends of lines, and beside text that only looks like JSON."""
    texts, source = [f"number {i} { {} }" for i in range(30)], tmp_path / name
    for encoding, end in (("utf-8", "\n"), ("utf-8-sig", "\r\n"), ("utf-8", "\r")):
        source.write_text(end.join(json.dumps({"id": 1, "text": text}) for text in texts), encoding=encoding, newline="")
        assert [*tokenizer.documents([source], None, lambda count: None)] == texts
    for text in ("[1] Introduction\n{}\n", "{ a set }", '{"a": 1} is JSON', "{\\rtf1}", '"quoted"\n[2]\n'):
        (tmp_path / "b.txt").write_text(text)
        assert [*tokenizer.documents([tmp_path / "b.txt"], None, lambda count: None)] == [text]


@pytest.mark.parametrize("name", ["corpus.json", "tokenizer.json", "val_000000.bin"])
def test_no_file_is_overwritten(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the vocabulary of a checkpoint. Nothing is read before."""
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / name).write_text("own")
    monkeypatch.setattr("launch.tokenize.documents", None)
    error = refused(main, [__file__, "--out", str(tmp_path / "tokens")])
    assert error == f"--out: expected a folder without corpus.json, tokenizer.json and *.bin, got {tmp_path}/tokens/{name}"
    assert (tmp_path / "tokens" / name).read_text() == "own"


@pytest.mark.parametrize("moved", range(4))
def test_tokens_are_never_without_their_facts(moved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after some files are in their place: the next command refuses the folder."""
    replace, done = Path.replace, list[Path]()

    def killed(path: Path, target: Path) -> Path:
        if len(done) == moved:
            raise KeyboardInterrupt
        done.append(target)
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            tokenize(tmp_path)
    assert [path.name for path in done] == ["corpus.json", "tokenizer.json", "train_000000.bin", "val_000000.bin"][:moved]
    if moved:
        assert refused(main, [__file__, "--out", str(tmp_path / "tokens")]).endswith("/tokens/corpus.json")


def test_a_vocabulary_with_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is the largest number of a token and one, with which the tokens can be read."""
    tokenize(tmp_path)
    for gap, dtype in ((500, "uint16"), (70_000, "uint32")):
        content = json.loads((tmp_path / "tokens" / "tokenizer.json").read_text())
        numbers = content["model"]["vocab"]
        last = max(numbers, key=numbers.get)
        numbers[last] += gap
        (tmp_path / f"{gap}.json").write_text(json.dumps(content))
        main(f"{tmp_path}/texts.txt --vocabulary {tmp_path}/{gap}.json --out {tmp_path}/{gap} --separator <end>\\n".split())
        (found,) = re.findall(r"data.classes=(\d+)", capsys.readouterr().out.splitlines()[-1])
        assert int(found) == numbers[last] + 1 == 300 + gap
        files = [open_tokens(path, int(found)) for path in (tmp_path / str(gap)).glob("*.bin")]
        assert {str(file.dtype) for file in files} == {dtype}
        assert max(file[np.arange(len(file))].max() for file in files) == numbers[last]
        load_dataset("tokens", root=tmp_path / str(gap), size=8, classes=int(found))


def test_every_text_must_be_given_back(tmp_path: Path) -> None:
    """Also the last of many: a vocabulary that composes letters changes a text that has a decomposed one."""
    tokenize(tmp_path)
    vocabulary = tokenizers.Tokenizer.from_file(str(tmp_path / "tokens" / "tokenizer.json"))
    vocabulary.normalizer = tokenizers.normalizers.NFC()
    texts = [("train", f"text {i}") for i in range(50)]
    tokenizer.write_tokens(texts, ["train"], vocabulary, tmp_path / "composed")
    with pytest.raises(DataError, match=r"--vocabulary: expected a vocabulary that gives the text back, got 'cafe?.' for 'cafe"):
        tokenizer.write_tokens([*texts, ("train", "cafe\u0301")], ["train"], vocabulary, tmp_path / "decomposed")


@pytest.mark.parametrize("line", ['{"text": null}', '{"content": "a"}', "[1, 2", '"text"'])
def test_a_line_without_a_text_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=re.escape(f'a.jsonl, line 3: expected a JSON object with a string "text", got {line}')):
        list(tokenizer.documents([tmp_path / "a.jsonl"], None, lambda count: None))


@pytest.mark.parametrize(("name", "content"), [("a.txt", "one<>two"), ("a.jsonl", '{"text": "one"}\n{"text": "two"}\n')])
def test_a_byte_order_mark_is_no_text(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    separator = "<>" if name == "a.txt" else None
    assert [*tokenizer.documents([tmp_path / name], separator, lambda count: None)] == ["one", "two"]
    with pytest.raises(ConfigError, match=r"^--separator: expected a text that occurs in the files"):
        [*tokenizer.documents([tmp_path / name], "zz", lambda count: None)]


def test_words_are_divided_only_if_they_are_long() -> None:
    """Each word takes the trainer a time that grows with the square of its length. Ordinary text has the tokens of whole words."""
    from tokenizers import pre_tokenizers

    text = "acgt\u00e9" * 1000
    vocabulary = tokenizer.train_vocabulary([text], 300)
    assert max(len(word) for word, _ in vocabulary.pre_tokenizer.pre_tokenize_str(text)) == 512
    assert vocabulary.decode(vocabulary.encode(text).ids) == text
    texts = [Path(__file__).read_text(encoding="utf-8"), *TEXTS, "=" * 500]
    found = tokenizer.train_vocabulary(texts, 400)
    ids = [found.encode(text).ids for text in texts]
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert [found.encode(text).ids for text in texts] == ids


@pytest.mark.parametrize(("sizes", "test"), [((3000,), ["--test", "0.05"]), ((5000, 1, 2), ["--test", "0.05"]), ((2000, 2500), [])])
def test_few_documents_give_about_the_asked_fraction(sizes: tuple[int, ...], test: list[str], tmp_path: Path) -> None:
    texts = [f"Chapter {size}: " + "".join(f"na\u00efve {i}, " for i in range(size)) for size in sizes]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    files = [str(path) for path in sorted(tmp_path.glob("*.txt"))]
    main([*files, "--validation", "0.02", *test, "--out", str(tmp_path / "tokens"), "--vocabulary", "300"])
    facts = json.loads((tmp_path / "tokens" / "corpus.json").read_text())
    total = sum(len(text.encode()) for text in texts)
    assert facts["val"]["bytes"] / total == pytest.approx(0.02, rel=0.1)
    if test:
        assert facts["test"]["bytes"] / total == pytest.approx(0.05, rel=0.1)
    parts = {part: decoded(tmp_path / "tokens", part) for part in ("train", "val", "test")[: 3 if test else 2]}
    assert sum(len(text) for found in parts.values() for text in found) == sum(map(len, texts))
    longest = max(texts, key=len)
    assert parts["val"][texts.index(longest) if len(parts["val"]) > 1 else 0] in longest[-len(longest) // 8 :]
