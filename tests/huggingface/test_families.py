"""Decoders that are accepted compute what ``transformers`` computes, and others are refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from petra.huggingface import PetraTrainer, from_pretrained
from petra.huggingface.check import candidates, check, tiny
from petra.huggingface.families import COMMAND, DECODERS, REFUSED, VERSION
from tests.huggingface.test_trainer import arguments, losses, rows
from tests.support.refusals import refuses

ROOT = Path(__file__).parents[2]
KINDS = ("GraniteForCausalLM", "Cohere2ForCausalLM", "MixtralForCausalLM")
"""Classes that scale embeddings and logits, have windows in some layers, and have experts."""


@pytest.mark.parametrize("name", KINDS)
def test_decoders_that_are_accepted_pass_the_check(name: str) -> None:
    assert name in DECODERS
    assert check(name) is None


def test_the_check_finds_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petra.huggingface.blocks.Scale.of", lambda model: None)
    assert check("CohereForCausalLM") == "whole rows: another logits"


def test_the_page_of_decoders_is_that_of_the_code() -> None:
    from docs.families import page

    assert page() == (ROOT / "docs/families.md").read_text(encoding="utf-8")
    if transformers.__version__ == VERSION:
        assert sorted([*DECODERS, *REFUSED]) == candidates()


@pytest.mark.parametrize("name", ["GraniteForCausalLM", "Cohere2ForCausalLM"])
def test_training_equals_that_of_trainer(name: str, tmp_path: Path) -> None:
    found = []
    for kind, others in ((transformers.Trainer, {}), (PetraTrainer, {"stages": 2})):
        model = tiny(getattr(transformers, name)).float()
        settings = {"max_steps": 3, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "warmup_steps": 0}
        trainer = kind(model, arguments(tmp_path / kind.__name__, **settings), train_dataset=rows(16), **others)
        trainer.train()
        found.append([row[0] for row in losses(trainer)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def of_class(name: str, **settings: Any) -> None:
    kind = getattr(transformers, name)
    config = kind.config_class(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, num_layers=1, vocab_size=61, **settings)
    with torch.device("meta"):
        from_pretrained(kind(config))


test_other_models_are_refused_with_the_reason = refuses(
    of_class,
    ("RobertaForMaskedLM", r"^model: .*, got RobertaForMaskedLM \(its positions are counted from its padding token, "),
    ("DistilBertForMaskedLM", r"got DistilBertForMaskedLM \(its head is of several modules"),
    ("T5ForConditionalGeneration", r"got T5ForConditionalGeneration \(of an encoder and a decoder"),
    ("AlbertForMaskedLM", r"got AlbertForMaskedLM \(its layers share their weights\)$"),
    ("PhimoeForCausalLM", rf"got PhimoeForCausalLM \(not checked: {COMMAND} PhimoeForCausalLM\)$"),
    kind=Exception,
)
