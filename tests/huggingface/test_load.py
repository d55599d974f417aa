"""Checkpoints: untied weights, types, new weights, errors in one line, and the same training in several processes."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor

from petra import DataError, PetraError, Pipeline, TensorSpec
from tests.support.nets import assert_equal, make_pipeline, sgd
from tests.support.processes import run_processes
from tests.support.refusals import refuses

pytest.importorskip("transformers")

from petra.huggingface import from_pretrained, next_tokens, save_pretrained, stack
from petra.huggingface.load import adapted
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


def test_weights_that_do_not_fit_are_named_and_equal_everywhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny("BertForMaskedLM").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    capfd.readouterr()
    first, second = (from_pretrained(tmp_path).build(0).state_dict() for _ in range(2))
    out, err = capfd.readouterr()
    assert not out
    has_no, has = err.splitlines()[:2]
    assert has_no.startswith(f"{tmp_path} has no bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias, ")
    assert has.startswith(f"{tmp_path} has cls.predictions.bias, ")
    assert has.endswith(", which BertForSequenceClassification does not use")
    assert_equal(first, second)


def folder_with(**settings: Any) -> Path:
    """Return the folder of a checkpoint whose configuration is changed."""
    folder = Path(mkdtemp())
    tiny("LlamaForCausalLM").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def merged() -> Any:
    model = adapted(tiny("LlamaForCausalLM"), 2)
    model.merge_adapter()
    return model


def load(make: Callable[[], Any], fields: tuple[str, ...] = (), delimiter: int | None = None) -> None:
    from_pretrained(make(), fields=("input_ids", *fields), delimiter=delimiter).profile(TensorSpec((2, 4), torch.int64))


LLAMA, BERT, IDS, MASK, POSITIONS = "LlamaForCausalLM", "BertForMaskedLM", "input_ids", "attention_mask", "position_ids"
OWN, BITS = {"AutoModelForCausalLM": "modeling.Own"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}
ONES = torch.ones(2, 4, dtype=torch.int64)
test_models_that_do_not_fit = refuses(
    load,
    (mkdtemp, "expected the folder of a checkpoint .*, got no config.json$"),
    (partial(folder_with, auto_map=OWN), r"a model of transformers \(no trust_remote_code\), got code of its own$"),
    (partial(folder_with, quantization_config=BITS), "the folder of a checkpoint of transformers, got .* requires bitsandbytes"),
    (lambda: tiny(LLAMA).model, "^model: expected a decoder that .* has found equal, .* or ViT.*, got LlamaModel$"),
    (merged, r"^model: expected adapters that are trained \(unmerge_adapter\), got merged ones$"),
    (partial(tiny, BERT), (POSITIONS,), "^fields: expected those of BertForMaskedLM: .*, token_type_ids, got position_ids$"),
    (mkdtemp, (MASK, POSITIONS), ", got both$"),
    (partial(tiny, LLAMA), (), VOCABULARY, f"^delimiter: expected None or one of {VOCABULARY} tokens, got {VOCABULARY}$"),
    (
        partial(tiny, LLAMA, attn_implementation="flex_attention"),
        (),
        3,
        r"^block layer0: .*\(attn_implementation: expected sdpa or eager .*, got flex_attention",
    ),
    kind=PetraError,
)
test_batches_that_do_not_fit = refuses(
    stack,
    ({IDS: ONES, MASK: ONES}, r"^batch: expected one with input_ids \(fields\), got one with attention_mask$"),
    ({IDS: ONES, POSITIONS: ONES}, (IDS, POSITIONS), "^position_ids: expected 0, 1, 2, … with a restart at 0 .*, got others$"),
    ({IDS: ONES, MASK: ONES * -10_000}, (IDS, MASK), "^attention_mask: expected 0 for padding and 1 for tokens, got others$"),
    ({IDS: ONES[0]}, r"^batch: expected integers \(B, T\) as input_ids, got torch.int64\[4\]$"),
    ({IDS: ONES}, (IDS,), 3, "^batch: expected rows of at most 3 tokens, got 4$"),
    kind=DataError,
)


def test_labels_of_one_dimension_and_weights_that_are_nan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^labels: expected labels \(B, T\), got a tensor of 1 dimensions"):
        next_tokens(ONES[0])
    model = tiny(LLAMA, torch.float32).eval()
    state = {key: t * float("nan") for key, t in from_pretrained(model).build(0).state_dict().items()}
    assert model.training, "dropout acts as in training"
    with pytest.raises(PetraError, match=r"^state: expected numbers, got NaN"):
        save_pretrained(model, state, tmp_path / "new")
    state = {key: torch.randn(t.shape, dtype=torch.bfloat16 if t.dim() > 1 else None) for key, t in state.items()}
    save_pretrained(model, state, tmp_path / "new")
    assert_equal({key: t.float() for key, t in state.items()}, from_pretrained(tmp_path / "new").build(0).state_dict())


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
