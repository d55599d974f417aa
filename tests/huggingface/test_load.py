"""Checkpoints: untied weights, types, new weights, errors in one line, and the same training in several processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petra import ConfigError, DataError, ModelError, Pipeline, TensorSpec
from tests.support.nets import assert_equal, make_pipeline, sgd
from tests.support.processes import run_processes

pytest.importorskip("transformers")

from petra.huggingface import from_pretrained, next_tokens, stack
from tests.huggingface.models import LENGTH, VOCABULARY, batch_of, tiny, with_context


def test_a_folder_of_tied_weights_is_untied_in_float32(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny("LlamaForCausalLM", torch.bfloat16, tied=True)
    model.save_pretrained(tmp_path)
    capfd.readouterr()
    network = from_pretrained(tmp_path).build(0)
    line = f"embedding and head shared weights, and are trained apart: {VOCABULARY * 16} more parameters\n"
    assert capfd.readouterr() == ("", line)
    state = network.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert_equal(state["head.parts.1.weight"], state["embedding.tokens.weight"])
    tokens = batch_of("LlamaForCausalLM", 1)[0]["input_ids"]
    torch.testing.assert_close(network(tokens), model.float()(tokens).logits.flatten(0, 1), rtol=1e-5, atol=1e-5)
    model.train()
    with torch.no_grad():
        network.embedding.tokens.weight.zero_()
    assert all(p.any() for p in (*model.parameters(), network.head.parts[1].weight))


def test_weights_that_a_checkpoint_lacks_are_named_and_equal_everywhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny("BertForMaskedLM").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    capfd.readouterr()
    first, second = (from_pretrained(tmp_path).build(0).state_dict() for _ in range(2))
    out, err = capfd.readouterr()
    assert not out
    assert err.splitlines()[0].startswith(f"{tmp_path} has no bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias, ")
    assert_equal(first, second)


def own_code(folder: Path) -> Any:
    tiny("LlamaForCausalLM").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    return from_pretrained(folder)


TOKENS = torch.ones(2, 4, dtype=torch.int64)
WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (lambda folder: from_pretrained(folder), "expected the folder of a checkpoint .*, got no config.json$"),
    "own code": (own_code, r"transformers \(trust_remote_code is refused\), got code of its own$"),
    "class": (
        lambda folder: from_pretrained(tiny("LlamaForCausalLM").model),
        r"^model: expected one of the classes LlamaForCausalLM, .* or ViTForImageClassification, got LlamaModel$",
    ),
    "fields": (
        lambda folder: from_pretrained(tiny("BertForMaskedLM"), fields=("input_ids", "position_ids")),
        "^fields: expected those of BertForMaskedLM: input_ids, attention_mask, token_type_ids, got position_ids$",
    ),
    "both": (lambda folder: from_pretrained(folder, fields=("input_ids", "attention_mask", "position_ids")), ", got both$"),
    "eager": (
        lambda folder: from_pretrained(tiny("LlamaForCausalLM", attn_implementation="eager"), delimiter=3).profile(
            TensorSpec((2, 4), torch.int64)
        ),
        "^attn_implementation: expected sdpa with padding or packed documents, got eager$",
    ),
    "a field more": (
        lambda folder: stack({"input_ids": TOKENS, "attention_mask": TOKENS}),
        r"^batch: expected one with input_ids \(fields\), got one with attention_mask$",
    ),
    "positions": (
        lambda folder: stack({"input_ids": TOKENS, "position_ids": TOKENS}, ("input_ids", "position_ids")),
        "^position_ids: expected 0, 1, 2, … with a restart at 0 for every document, got others$",
    ),
    "long": (lambda folder: stack({"input_ids": TOKENS}, size=3), "^batch: expected rows of at most 3 tokens, got 4$"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_one_clear_error(case: str, tmp_path: Path) -> None:
    call, message = WRONG[case]
    with pytest.raises((ConfigError, DataError, ModelError), match=message) as found:
        call(tmp_path)
    assert "\n" not in str(found.value)


class Padded:
    """Padded microbatches of tokens by index."""

    fields = ("input_ids", "attention_mask")

    def inputs(self, m: int) -> Tensor:
        return stack(with_context("right", *batch_of("LlamaForCausalLM", m))[0], self.fields, LENGTH + 2)

    def targets(self, m: int) -> Tensor:
        labels = with_context("right", *batch_of("LlamaForCausalLM", m))[1].view(-1, LENGTH)
        return next_tokens(labels, LENGTH + 2)


def trained(rank: int | None, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return this process's weights of a Llama and a BERT after training on padded batches."""
    torch.set_num_threads(1)
    found = {}
    for name, method in (("llama", "petra"), ("bert", "pipedream_2bw"), ("llama", "1f1b")):
        model = from_pretrained(folder / name, fields=Padded.fields)
        spec = TensorSpec((3, 2, LENGTH + 2), torch.int64)
        pipeline: Pipeline = make_pipeline(model, spec, optimizer=sgd, method=method, k=4, stages=4)
        pipeline.train(Padded(), 12)
        found[f"{name} {method}"] = {key: value.clone() for key, value in pipeline.state_dict().items()}
    return found


@pytest.mark.processes
def test_weights_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    tiny("LlamaForCausalLM", torch.float32, tied=True).save_pretrained(tmp_path / "llama")
    tiny("BertForMaskedLM", torch.float32, tied=True, **dropout).save_pretrained(tmp_path / "bert")
    alone = trained(None, tmp_path)
    parts = run_processes(3, trained, tmp_path / "processes", tmp_path, timeout=200)  # of one stage and of two
    assert_equal({case: {key: v for part in parts for key, v in part[case].items()} for case in alone}, alone)
