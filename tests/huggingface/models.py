"""Tiny random models of every supported class of ``transformers``, untied, and what they compute themselves."""

import os
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from petra.huggingface.blocks import split

VOCABULARY, LENGTH = 61, 12
DECODER = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
GROUPED = {**DECODER, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "max_position_embeddings": 32}
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": GROUPED,
    "Qwen2ForCausalLM": {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3ForCausalLM": GROUPED,
    "MistralForCausalLM": {**GROUPED, "sliding_window": 5},
    "GemmaForCausalLM": GROUPED,
    "Gemma2ForCausalLM": {**GROUPED, "sliding_window": 5},
    "Gemma3ForCausalLM": {**GROUPED, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "GPT2LMHeadModel": {"vocab_size": VOCABULARY, **GPT2},
    "BertForMaskedLM": {**DECODER, **PLAIN, "max_position_embeddings": 32},
    "BertForSequenceClassification": {**DECODER, **PLAIN, "max_position_embeddings": 32, "num_labels": 3},
    "ViTForImageClassification": {**DECODER, **PLAIN, "image_size": 8, "patch_size": 4, "num_labels": 3},
}
"""Settings of the configuration by class."""


def as_torchrun(rank: int, world: int) -> None:
    """Set the variables that torchrun sets for a process."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "localhost"}
    os.environ.update({name: str(value) for name, value in {**names, "MASTER_PORT": 1}.items()})


def tiny(name: str, dtype: torch.dtype = torch.float64, *, tied: bool = False, **settings: Any) -> Any:
    """Return a random model in training mode. No module of it is at its initial value, such as biases of 0."""
    kind = getattr(transformers, name)
    config = kind.config_class(**{**SETTINGS[name], **settings}, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = kind(config).to(dtype).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def batch_of(name: str, m: int, rows: int = 3, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of microbatch ``m`` by field, and its targets."""
    generator = torch.Generator().manual_seed(m)
    if name.startswith("ViT"):
        inputs = {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator, dtype=dtype)}
    else:
        inputs = {"input_ids": torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)}
    classes, count = (3, rows) if "Classification" in name else (VOCABULARY, rows * LENGTH)
    return inputs, torch.randint(classes, (count,), generator=generator)


def reference(model: Any, inputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return logits, loss and gradients of one microbatch, computed by the model itself, by the names of petra's parameters."""
    model.zero_grad()
    model.config.use_cache = False  # with a cache, transformers takes packed documents for one
    logits = model(**inputs).logits.flatten(0, -2)
    loss = F.cross_entropy(logits, targets)
    loss.backward()
    blocks = split(model, ("input_ids",), None)
    named = {f"{block}.{key}": p for block, module in blocks.items() for key, p in module.named_parameters()}
    return logits.detach(), loss.detach(), {key: p.grad.clone() for key, p in named.items() if p.grad is not None}


def with_context(kind: str, inputs: dict[str, Tensor], targets: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch of tokens with padding at the left or right, or of packed documents, and its targets."""
    tokens, targets = inputs["input_ids"], targets.clone().view(inputs["input_ids"].shape)
    index = torch.arange(LENGTH).expand(tokens.shape)
    starts = torch.tensor([4, 0, 7])[: len(tokens), None]  # the second row has no padding, and is one document
    if kind == "packed":
        return {"input_ids": tokens, "position_ids": torch.where(index < starts, index, index - starts)}, targets.flatten()
    padding = index < starts if kind == "left" else index >= LENGTH - starts
    masked = {"input_ids": tokens.masked_fill(padding, 0), "attention_mask": (~padding).long()}
    return masked, targets.masked_fill(padding, -100).flatten()
