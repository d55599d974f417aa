"""From text to text: tokenize, train over several stages, evaluate, generate."""

import json
import math
import os
import re
import shutil
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from markupsafe import escape

from launch import evaluate, generate, tokenize
from launch.config.compose import compose_overrides
from launch.run.folder import epochs_in
from launch.run.text import TextSample, vocabulary
from petra.errors import ModelError, PetraError
from petra.models import revgpt
from petra.training import load
from tests.support.commands import refused, train
from tests.support.forked import Forked

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
    (row,) = epochs_in(trained / "run")
    assert row["test_bits_per_byte"] == pytest.approx(row["test_loss"] / math.log(2) * corpus["tokens"] / corpus["bytes"])
    evaluate.main([f"{trained}/run"])
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] == pytest.approx(row["test_bits_per_byte"])
    assert f"{row['test_bits_per_byte']:.4f}" in (trained / "run" / "report.html").read_text()
    assert (trained / "output.txt").read_text().splitlines()[-1].startswith(f"val perplexity {row['test_perplexity']:.3f} after ")


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


def test_the_sample_after_an_epoch_is_the_text_that_generate_writes(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = epochs_in(trained / "run")
    generate.main([f"{trained}/run", "--tokens=60"])
    assert row["sample"] + "\n" == capsys.readouterr().out
    assert f"  sample: {row['sample']!r}\n" in (trained / "output.txt").read_text()
    assert f'<pre class="wrapped">{escape(row["sample"])}</pre>' in (trained / "run" / "report.html").read_text()


def in_a_folder_of_its_own(rank: int) -> None:
    os.makedirs(f"machine{rank}", exist_ok=True)
    os.chdir(f"machine{rank}")


@pytest.mark.processes
def test_only_the_first_process_needs_the_vocabulary_for_a_sample(trained: Path, tmp_path: Path) -> None:
    """The three processes write the text of the run in one process."""
    shutil.copytree(trained / "tokens", tmp_path / "machine0" / "tokens")
    words = [*RUN, "trainer.stages=3", "data.root=tokens", f"run_dir={tmp_path}/run"]
    with Forked(tmp_path, words, 3, prepare=in_a_folder_of_its_own) as run:
        run.finish()
    train(*RUN, "trainer.stages=3", f"data.root={trained}/tokens", f"run_dir={tmp_path}/one")
    (one,), (three,) = (epochs_in(tmp_path / name) for name in ("one", "run"))
    assert one["sample"] == three["sample"] != ""


def test_a_sample_that_fails_in_the_first_process_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = (ModelError, "weights: expected those of a network with finite logits, got nan")
    monkeypatch.setattr("launch.run.text.gathered_blocks", lambda pipeline: ())
    sample: Any = object.__new__(TextSample)
    plan = SimpleNamespace(model=SimpleNamespace(build=lambda seed: torch.nn.Identity()))
    sample._seed, sample._pipeline = 0, SimpleNamespace(rank=0, averaged=nullcontext, plan=plan)
    assert sample() == {}, "a network of one's own, which may not generate text, trains without a sample"
    monkeypatch.setattr("petra.distributed.all_gather_objects", lambda own, *_: [failure, own])
    sample._pipeline = SimpleNamespace(rank=1, averaged=nullcontext)
    with pytest.raises(PetraError, match="finite logits, got nan"):
        sample()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens=0"], "--tokens: expected an integer >= 1, got 0"),
        (["--top-k=0"], "top_k: expected null or an integer >= 1, got 0"),
        (["--temperature=1e-310"], "temperature: expected 0 for .* token, or a number from 1e-100 to .*, got 1e-310"),
        (["--prompt=a\udcff"], "--prompt: expected text in UTF-8, got 'a.udcff'"),
        (["--vocabulary=missing.json"], "missing.json: can't be read as a vocabulary"),
        (["model.delimiter=5"], "model.delimiter: expected null or 0, as in .*tokenizer.json, got 5"),
        (["model.hidden=31"], "RUN/model.safetensors: does not fit revgpt"),
        (["trainer.stages=[2"], "command line: expected an override in Hydra's syntax, got trainer.stages=\\[2"),
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
    encode, decode, _ = vocabulary(config, None, lambda name, found: None)
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
            assert "expected the vocabulary or names of classes" in error
            assert str(other) in error or error.startswith("data.root: ")
    with pytest.raises(PetraError, match=r"^model\.delimiter: expected null or 0, as in corpus\.json, got 5"):
        train(*RUN, f"data.root={trained}/tokens", "model.delimiter=5", "trainer.sample=null")


def test_a_sample_has_the_vocabulary_of_the_tokens(trained: Path, other: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "tokens", tmp_path / "tokens")
    shutil.copy(other / "tokenizer.json", tmp_path / "tokens")
    with pytest.raises(PetraError, match=r"tokenizer\.json: expected the vocabulary of corpus\.json beside it, got another"):
        train(*RUN, f"data.root={tmp_path}/tokens", f"run_dir={tmp_path}/run")


def test_weights_that_are_named_are_compared_with_the_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (trained / "run" / "config.yaml").read_text()
    shutil.copytree(trained / "run", tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(config.replace("label_smoothing: 0.0", "label_smoothing: 0.1"))
    evaluate.main([f"{tmp_path}/run", f"--weights={trained}/run/model.safetensors"])
    assert "warning: they were trained with another trainer.label_smoothing than" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["resume", "init_from"])
def test_a_run_does_not_start_from_weights_for_another_vocabulary(word: str, trained: Path, other: Path, tmp_path: Path) -> None:
    if word == "resume":
        shutil.copytree(trained / "run", tmp_path / "run")
    changes = ["resume=auto" if word == "resume" else f"init_from={trained}/run", f"run_dir={tmp_path}/run", "trainer.epochs=2"]
    with pytest.raises(PetraError, match=r"^data\.root: expected the vocabulary or .* \w{12}, with which .* was trained, got "):
        train(*RUN, f"data.root={other}", *changes)


def test_a_run_resumes_on_its_own_text_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another network of the same shapes may start from its weights, and says so."""
    path, run = tmp_path / "a.txt", f"{tmp_path}/run"
    words = [*RUN[2:6], *RUN[13:], "model.dim=16", "model.depth=2", "model=revgpt", "data=text", f"data.root={path}"]
    path.write_text("Sun and sea. " * 200)
    train(*words, "model.heads=4", f"run_dir={run}")
    train(*words, "model.heads=2", f"run_dir={tmp_path}/other", f"init_from={run}")
    assert "(1 epochs done); trained with other values: model.heads\n" in capsys.readouterr().out
    path.write_text("Sea and sun. " * 200)
    assert refused(generate.main, [run, "--vocabulary=a.json"]).startswith("--vocabulary: expected none for a run on bytes")
    with pytest.raises(PetraError, match=r"^data\.root: expected the training data of .*000000008, got others$"):
        train(*words, "model.heads=4", f"run_dir={run}", "resume=auto", "trainer.epochs=2")
