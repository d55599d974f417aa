"""From text to text: tokenize, train over several stages, evaluate, generate."""

import json
import math
import re
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from launch import evaluate, generate, tokenize
from launch.config.compose import compose_overrides
from launch.run.folder import RunFolder
from launch.run.weights import SavedWeights
from petra.errors import PetraError
from petra.models import revgpt
from petra.training import load
from tests.support.commands import refused, train

pytest.importorskip("tokenizers", reason="the extra 'text' is not installed")

SHAPE = {"dim": 16, "depth": 2, "heads": 4, "kv_heads": 2, "hidden": 32}
SPLIT = ("--separator", "<>", "--validation", "0.2")
RUN = (
    *("data=tokens", "data.classes=280", "data.size=16", "data.batch_size=4", "optim=adamw", "optim.lr=1e-3"),
    *("model=revgpt_1m", *(f"model.{key}={value}" for key, value in SHAPE.items()), "model.delimiter=0", "trainer.epochs=1"),
    *("trainer.device=cpu", "trainer.stages=2", "trainer.limit_batches=8", "trainer.export=safetensors"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run on a small corpus, whose vocabulary, tokens and output lie beside it."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "a.txt").write_text("<>".join(f"The {w} of {i} is the {w}. " * 5 for i in range(30) for w in ("sun", "sea")))
    tokenize.main([str(folder / "a.txt"), "--out", str(folder / "tokens"), *SPLIT, "--vocabulary", "280"])
    with (folder / "output.txt").open("w") as output, redirect_stdout(output):
        train(*RUN, f"data.root={folder}/tokens", f"run_dir={folder}/run")
    return folder


def test_loss_is_also_in_bits_per_byte(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = json.loads((trained / "tokens" / "corpus.json").read_text())["val"]
    (row,) = RunFolder(trained / "run").rows()
    assert row["test_bits_per_byte"] == pytest.approx(row["test_loss"] / math.log(2) * corpus["tokens"] / corpus["bytes"])
    evaluate.main([f"{trained}/run"])
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] == pytest.approx(row["test_bits_per_byte"])
    assert f"{row['test_bits_per_byte']:.4f}" in (trained / "run" / "report.html").read_text()
    assert (trained / "output.txt").read_text().splitlines()[-1].startswith(f"test perplexity {row['test_perplexity']:.3f} after ")


def test_greedy_text_is_that_of_the_exported_network(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The network is loaded in plain PyTorch, and the text decoded by tokenizers itself."""
    import tokenizers

    generate.main([f"{trained}/run", "--prompt=The sun, of", "--tokens=8", "--temperature=0"])
    printed = capsys.readouterr().out
    modern = {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rotary", "qk_norm": True, "delimiter": 0}
    network = revgpt(280, size=16, **SHAPE, **modern).build(0).eval()
    network.load_state_dict(load(trained / "run" / "model.safetensors"))
    vocabulary = tokenizers.Tokenizer.from_file(str(trained / "tokens" / "tokenizer.json"))
    text = [0, *vocabulary.encode("The sun, of").ids]
    for _ in range(8):
        text.append(int(network(torch.tensor([text]))[-1].argmax()))
    assert printed.rstrip("\n") == vocabulary.decode(text[1:]).rstrip("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens=0"], "--tokens: expected an integer >= 1, got 0"),
        (["--temperature=1e-310"], "temperature: expected 0 for .* token, or a number from 1e-100 to .*, got 1e-310"),
        (["--prompt=a\udcff"], "--prompt: expected text in UTF-8, got 'a.udcff'"),
        (["--vocabulary=missing.json"], "missing.json: can't be read as a vocabulary"),
        (["model.delimiter=5"], "model.delimiter: expected null or 0, as in .*tokenizer.json, got 5"),
        (["model.hidden=31"], "RUN/model.safetensors: does not fit revgpt"),
        (["data.root=[x"], "data.root: expected a value in YAML"),
    ],
)
def test_invalid_words_give_one_line(words: list[str], message: str, trained: Path) -> None:
    error = refused(generate.main, [f"{trained}/run", *words])
    assert re.match(message.replace("RUN", f"{trained}/run"), error)


def test_pieces_are_those_of_decoding_the_whole_text(trained: Path) -> None:
    """Characters of several tokens appear once they are complete."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(trained / "tokens" / "tokenizer.json"))
    config = compose_overrides(["model=revgpt_1m", "data=tokens", f"data.root={trained}/tokens", "data.classes=280"])
    encode, decode, _ = generate.vocabulary(config, None, SavedWeights(trained / "run" / "model.safetensors"))
    tokens = encode("naïve café → 日本\n twice twice")[1:]
    shown, expected = "", []
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end])
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            expected.append(text[len(shown) :])
            shown = text
    assert [*decode(tokens)] == [piece for piece in expected if piece]
    assert "".join(expected).strip() == "naïve café → 日本\n twice twice"


@pytest.fixture(scope="module")
def other(trained: Path) -> Path:
    """Tokens of a vocabulary of the same size, of which some are other words."""
    (trained / "b.txt").write_text("<>".join(f"A {w} by {i} or a {w}? " * 5 for i in range(30) for w in ("ship", "port")))
    tokenize.main([str(trained / "b.txt"), *SPLIT, "--vocabulary", "280", "--out", f"{trained}/other"])
    return trained / "other"


def test_another_vocabulary_of_the_same_size_is_refused(trained: Path, other: Path) -> None:
    """Of exported weights and of checkpoints, by evaluate and generate, as data.root or as files that replace the run's."""
    (checkpoint,) = (path for path in (trained / "run" / "checkpoints").iterdir() if path.is_dir())
    for words in ([], [f"--weights={checkpoint}"]):
        for command, root in ((evaluate.main, f"data.root={other}"), (generate.main, f"--vocabulary={other}/tokenizer.json")):
            error = refused(command, [f"{trained}/run", root, *words])
            assert "expected tokens of the vocabulary" in error
            assert str(other) in error or error.startswith("data.root: ")


@pytest.mark.parametrize("word", ["resume", "init_from"])
def test_a_run_does_not_start_from_weights_for_another_vocabulary(word: str, trained: Path, other: Path, tmp_path: Path) -> None:
    if word == "resume":
        shutil.copytree(trained / "run", tmp_path / "run")
    changes = ["resume=auto" if word == "resume" else f"init_from={trained}/run", f"run_dir={tmp_path}/run", "trainer.epochs=2"]
    with pytest.raises(PetraError, match=r"^data\.root: expected tokens of the vocabulary \w{12}, with which .* was trained, got "):
        train(*RUN, f"data.root={other}", *changes)
