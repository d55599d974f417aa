"""The commands and the snippets of the page, on a tiny checkpoint, without a network."""

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import export
from launch.evaluate import read_run, run_parser
from petra.data.tokenizer import train_vocabulary
from petra.errors import DataError
from tests.structure import ROOT
from tests.support.commands import ALONE, refused
from tests.support.commands import train as train_here

pytest.importorskip("transformers")

import transformers

from tests.huggingface.models import tiny

PAGE = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
TEXT = "".join(f"The {word} of {i} is the {word}. " for i in range(300) for word in ("sun", "sea"))
SMALLER = {"data.classes=49152": "data.classes=280", "data.size=256": "data.size=16"}
SHORT = ["trainer.limit_batches=8", "trainer.device=cpu", "trainer.sample=4"]


def page_commands() -> Iterator[list[str]]:
    """Yield the words of the page's commands after ``petra``, with the sizes of the tiny checkpoint, for one process."""
    block, *_ = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", "").splitlines():
        words = shlex.split(line)
        if words[0] == "petra":
            words = [SMALLER.get(word, word) for word in words[1:]]
            yield [*words, *SHORT] if words[0] == "train" else words


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """Folder in which the commands of the page have run, and what each has printed."""
    folder = tmp_path_factory.mktemp("huggingface")
    (folder / "book.txt").write_text(TEXT)
    tiny("LlamaForCausalLM", torch.bfloat16, tied=True, vocab_size=290).save_pretrained(folder / "SmolLM2")
    train_vocabulary([TEXT], 280).save(str(folder / "SmolLM2" / "tokenizer.json"))
    (folder / "SmolLM2" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    printed = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, *words in page_commands():
            with redirect_stdout(StringIO()) as output:
                if name == "train":
                    train_here(*(word for word in words if "=" in word))
                else:
                    import_module(f"launch.{name}").main(words)
            printed[name] = output.getvalue()
        yield folder, printed


def test_the_commands_give_a_checkpoint_that_transformers_loads(done: tuple[Path, dict[str, str]]) -> None:
    folder, printed = done
    assert [*printed] == ["tokenize", "train", "evaluate", "generate", "export"]
    assert "model.delimiter=0" in printed["tokenize"]
    assert printed["generate"].startswith("It was a dark night")
    scope: dict[str, object] = {}
    snippets = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    for code in [*snippets, *snippets]:
        if "from trl" not in code or find_spec("trl"):
            exec(compile(code, "docs/huggingface.md", "exec"), scope)
    model, tokenizer = scope["model"], scope["tokenizer"]
    assert not model.config.tie_word_embeddings
    assert model.dtype == torch.float32
    assert tokenizer("The sun").input_ids == tokenizer.backend_tokenizer.encode("The sun").ids
    options = run_parser(None).parse_args([str(folder / "runs" / "tuned")])
    weights, config = read_run(options, [], ALONE, ())
    tokens = torch.randint(1, 280, (2, 16), generator=torch.Generator().manual_seed(0))
    network = weights.network(config)
    torch.testing.assert_close(model.eval()(tokens).logits.flatten(0, 1), network(tokens), rtol=1e-5, atol=1e-5)
    before = transformers.AutoModelForCausalLM.from_pretrained(folder / "SmolLM2").float()
    assert not torch.equal(before.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_adapters_are_added_to_the_exported_weights(done: tuple[Path, dict[str, str]]) -> None:
    folder = done[0]
    words = next(words for words in page_commands() if words[0] == "train")
    kept = [word for word in words if "=" in word and "run_dir" not in word]
    train_here(*kept, "model.lora=2", "run_dir=runs/lora", "optim.lr=1e-2")
    export.main(["runs/lora", "--huggingface", "adapted"])
    model = transformers.AutoModelForCausalLM.from_pretrained("adapted").eval()
    before = transformers.AutoModelForCausalLM.from_pretrained(folder / "SmolLM2").float()
    assert torch.equal(model.lm_head.weight, before.lm_head.weight)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before.model.layers[0].mlp.up_proj.weight)
    weights, config = read_run(run_parser(None).parse_args(["runs/lora"]), [], ALONE, ())
    tokens = torch.randint(1, 280, (2, 16), generator=torch.Generator().manual_seed(0))
    found = model(tokens).logits.flatten(0, 1)
    torch.testing.assert_close(found, weights.network(config)(tokens), rtol=1e-5, atol=1e-5)


def test_another_network_in_the_folder_of_the_checkpoint_is_refused(done: tuple[Path, dict[str, str]]) -> None:
    folder = done[0]
    file = folder / "SmolLM2" / "config.json"
    content = file.read_text()
    weights, config = read_run(run_parser(None).parse_args([str(folder / "runs" / "tuned")]), [], ALONE, ())
    try:
        file.write_text(json.dumps(json.loads(content) | {"transformers_version": "0"}))
        weights.require_network(config)
        file.write_text(json.dumps(json.loads(content) | {"rms_norm_eps": 0.5}))
        with pytest.raises(DataError, match=r"^model\.path: expected a folder whose config.json describes the network of .*tuned"):
            weights.network(config)
        words = next(words for words in page_commands() if words[0] == "train")
        with pytest.raises(DataError, match=r"^model\.path: expected a folder whose config.json"):
            train_here(*(word for word in words if "=" in word), "resume=auto")
    finally:
        file.write_text(content)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("data.classes=291", r"data\.classes: expected at most 290, the tokens of SmolLM2, got 291"),
        ("data.size=33", r"data\.size: expected at most 32, the positions of SmolLM2, got 33"),
        ("model.path=nowhere", "nowhere: expected the folder of a checkpoint .*, got no config.json"),
    ],
)
def test_settings_that_do_not_fit_the_checkpoint_are_refused(key: str, message: str, done: tuple[Path, dict[str, str]]) -> None:
    words = next(words for words in page_commands() if words[0] == "train")
    with pytest.raises(Exception, match=message):
        train_here(*(word for word in words if "=" in word), "run_dir=runs/refused", key)
    if key.startswith("model"):
        line = refused(export.main, ["runs/tuned", "--huggingface", "SmolLM2"])
        assert line == "SmolLM2: expected a new or empty folder, got one with files"


def test_bytes_for_a_checkpoint_with_a_tokenizer_are_a_warning(done: tuple[Path, dict[str, str]], capsys: Any) -> None:
    words = next(words for words in page_commands() if words[0] == "train")
    kept = [word for word in words if "=" in word and not word.startswith(("run_dir", "data=", "data.", "model.delimiter"))]
    train_here(*kept, "data=text", "data.root=book.txt", "data.size=16", "data.batch_size=4", "run_dir=runs/bytes")
    assert "warning: data.root: expected tokens of SmolLM2/tokenizer.json (petra tokenize" in capsys.readouterr().out
