"""Blocks of a model of ``transformers`` compute what the model computes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from petra import TensorSpec
from tests.support.nets import Recorder, gradients, make_pipeline
from tests.support.pairs import all_pairs

pytest.importorskip("transformers")

from peft import LoraConfig, get_peft_model

from petra.huggingface import FIELDS, from_pretrained, stack
from tests.huggingface.models import LENGTH, SETTINGS, batch_of, reference, tiny, with_context


def source(inputs: Tensor, targets: Tensor) -> Any:
    """Return a data source of one microbatch."""
    return SimpleNamespace(inputs=lambda m: inputs, targets=lambda m: targets)


def trained(model: Any, inputs: Tensor, targets: Tensor, method: str, **settings: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return logits, loss and gradients of one microbatch in a pipeline of one block per stage."""
    converted = from_pretrained(model, **settings)
    spec = TensorSpec(tuple(inputs.shape), inputs.dtype)
    pipeline = make_pipeline(converted, spec, optimizer=Recorder, method=method)
    logits = converted.build(0)(inputs).detach()
    loss = pipeline.train(source(inputs, targets), 1).loss
    return logits, torch.tensor(loss, dtype=logits.dtype), gradients(pipeline)


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_loss_and_gradients_equal_those_of_the_model(name: str) -> None:
    for dtype, method, tolerance in ((torch.float64, "petra", 1e-10), (torch.float32, "1f1b", 1e-5)):
        model = tiny(name, dtype)
        batch, targets = batch_of(name, 1, dtype=dtype)
        inputs = batch["pixel_values"] if "pixel_values" in batch else stack(batch)
        found, expected = trained(model, inputs, targets, method), reference(model, batch, targets)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert found[2]


TOKENS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM")
"""Classes of full, sliding and mixed windows, learned positions, and attention to both sides."""


@pytest.mark.parametrize(("name", "kind", "adapted"), all_pairs(TOKENS, ("left", "right", "packed"), (False, True)))
def test_padding_packed_documents_and_adapters_equal_those_of_the_model(name: str, kind: str, adapted: bool) -> None:
    model = base = tiny(name)
    if adapted:
        layers = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(base, layers)
    encoder = name.startswith("Bert")
    batch, targets = with_context("right" if encoder and kind == "packed" else kind, *batch_of(name, 2))
    if encoder:
        batch["token_type_ids"] = (torch.arange(LENGTH) > 5).long().expand(3, -1)
    fields = tuple(field for field in FIELDS if field in batch)
    found = trained(model, stack(batch, fields), targets, "petra", fields=fields)
    expected = reference(base, batch, targets)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert all(("lora_" in key) == adapted for key in found[2])


def test_adapters_train_with_no_gradient_and_no_state_of_frozen_weights() -> None:
    model = get_peft_model(tiny("LlamaForCausalLM"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    converted = from_pretrained(model)
    pipeline = make_pipeline(
        converted, TensorSpec((3, LENGTH), torch.int64), optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1), method="dsp"
    )
    assert [boundary.backward_bytes > 0 for boundary in pipeline.plan.boundaries] == [False, True, True]  # none to the embedding
    before = {key: value.clone() for key, value in pipeline.state_dict().items()}
    inputs, targets = batch_of("LlamaForCausalLM", 3)
    pipeline.train(source(inputs["input_ids"], targets), 4)
    changed = {key for key, value in pipeline.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {key for key in before if "lora_" in key}
    parameters = [p for _, block in pipeline.blocks() for p in block.parameters()]
    assert all((p.grad is not None) == p.requires_grad for p in parameters)
    optimizers = [worker.update.optimizer for worker in pipeline.workers.values() if worker.update.optimizer is not None]
    assert {id(p) for o in optimizers for p in o.state} == {id(p) for p in parameters if p.requires_grad}


@pytest.mark.parametrize("name", TOKENS[:4])
def test_documents_that_a_delimiter_divides_do_not_see_each_other(name: str) -> None:
    model, delimiter = tiny(name), 3
    tokens = batch_of(name, 4)[0]["input_ids"] % 50 + 4
    tokens[:, [0, 7]] = delimiter
    together = from_pretrained(model, delimiter=delimiter).build(0)(tokens).unflatten(0, (3, -1))
    alone = [model(input_ids=part).logits for part in (tokens[:, :7], tokens[:, 7:])]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-10, atol=1e-10)
