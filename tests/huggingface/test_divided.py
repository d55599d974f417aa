"""Layers of pre-trained models that two processes divide, against whole ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petra import Pipeline, Recipe, Runtime
from petra.errors import PetraError
from petra.huggingface import from_pretrained
from petra.huggingface.load import adapted
from tests.huggingface.models import LENGTH, VOCABULARY, tiny
from tests.support.nets import RandomTokens, assert_equal, sgd
from tests.support.processes import run_processes
from tests.support.refusals import refuses

NAMES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM")
TOKENS = RandomTokens(3, LENGTH, VOCABULARY)


def trained(rank: int, tp: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name in NAMES:
        model = from_pretrained(tiny(name, torch.float32))
        pipeline = Pipeline(model, TOKENS.spec, Recipe(lambda module: sgd(module, 0.01)), k=2, stages=1, runtime=Runtime(tp=tp))
        pipeline.train(TOKENS, 8)
        found[name] = pipeline.state_dict()
    return found


@pytest.mark.processes
def test_divided_layers_equal_whole_ones(tmp_path: Path) -> None:
    """Two processes against one. Qwen3 and Gemma3 normalise queries and keys of the heads that a process has."""
    torch.set_num_threads(1)
    whole, parts = trained(0, 1), run_processes(2, trained, tmp_path, 2, timeout=180)
    assert_equal(*parts)
    for name in NAMES:
        torch.testing.assert_close(parts[0][name], whole[name], rtol=1e-4, atol=1e-5)


def divide(name: str, rank: int | None, settings: dict[str, Any]) -> None:
    model = tiny(name, torch.float32, **settings)
    from_pretrained(model if rank is None else adapted(model, rank)).blocks[1].build().divisible(2)


test_layers_that_cannot_be_divided = refuses(
    divide,
    ("GPT2LMHeadModel", None, {}, "tp: expected 1 for gpt2, which has no base_model_tp_plan, got 2"),
    ("LlamaForCausalLM", 2, {}, "tp: expected 1 with layers that the base_model_tp_plan lacks, such as adapters"),
    ("LlamaForCausalLM", None, {"attention_dropout": 0.1}, "attention_dropout: expected 0 with tp"),
    ("LlamaForCausalLM", None, {"num_key_value_heads": 1}, "tp: expected a divisor of 1, the number of key and value heads"),
    kind=PetraError,
)
