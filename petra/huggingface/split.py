"""Which modules of a model of ``transformers`` make which block.

===============================  =============================  ====================  ==============================================
class of the model               embedding                      one block per layer   head
===============================  =============================  ====================  ==============================================
decoders (:data:`DECODERS`)      ``embed_tokens``               ``layers``            ``norm``, ``lm_head``
GPT2LMHeadModel                  ``wte``, ``wpe``, ``drop``     ``h``                 ``ln_f``, ``lm_head``
BertForMaskedLM                  ``embeddings``                 ``encoder.layer``     ``cls``
BertForSequenceClassification    ``embeddings``                 ``encoder.layer``     ``pooler``, ``dropout``, ``classifier``
ViTForImageClassification        ``embeddings``                 ``layers``            ``layernorm``, first position, ``classifier``
===============================  =============================  ====================  ==============================================

Names of a decoder's modules are those of its ``base_model_pp_plan``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from petra.errors import ModelError, alternatives, invalid, require
from petra.huggingface.blocks import Embedding, Head, Layer
from petra.huggingface.inputs import FIELDS

DECODERS = tuple(f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3"))
"""Classes of the decoders that have a ``base_model_pp_plan`` and are tested. SmolLM and SmolLM2 are Llama."""
PLAN = ("embed_tokens", "layers", "norm")
"""Modules in the ``base_model_pp_plan`` of a decoder."""


def split(model: Any, fields: Sequence[str], delimiter: int | None) -> dict[str, nn.Module]:
    """Return blocks by name that contain the modules of a model, which they share with it.

    Args:
        model: Model of ``transformers``.
        fields: Names of the rows of the inputs.
        delimiter: Token with which every document begins, or None.

    Raises:
        ModelError: If the class of the model is not supported, or it has no inputs that ``fields`` and ``delimiter`` name.
    """
    name = type(model).__name__
    if name not in SPLITTERS:
        raise invalid("model", f"one of the classes {alternatives(SPLITTERS)}", name, ModelError)
    kind = "bert" if name.startswith("Bert") else "vit" if name.startswith("ViT") else "causal"
    accepted = {"causal": FIELDS[:3], "bert": (FIELDS[0], FIELDS[1], FIELDS[3]), "vit": FIELDS[:1]}[kind]
    unknown = [field for field in fields if field not in accepted]
    require(not unknown, "fields", f"those of {name}: {', '.join(accepted)}", ", ".join(unknown), ModelError)
    require(delimiter is None or kind == "causal", "delimiter", f"None for {name}", delimiter, ModelError)
    embedding, layers, head = SPLITTERS[name](model)
    first = embedding[0]
    if kind != "vit":
        first = Embedding(first, model.config, fields, delimiter, *embedding[1:], whole=kind == "bert")
    return {"embedding": first, **{f"layer{i}": layer for i, layer in enumerate(layers)}, "head": head}


Parts = tuple[list[nn.Module], list[nn.Module], nn.Module]
"""Modules of the embedding, blocks of the layers, and block of the head."""


def _decoder(model: Any) -> Parts:
    config, base = model.config, getattr(model, model.base_model_prefix)
    plan = config.base_model_pp_plan or {}
    require(tuple(plan) == PLAN, "base_model_pp_plan", ", ".join(PLAN), ", ".join(plan), ModelError)
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    require(not bidirectional, "use_bidirectional_attention", "false", bidirectional, ModelError)
    tokens, layers, norm = (getattr(base, name) for name in plan)
    one = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [one] * len(layers)
    # Tables of rotation that depend on the kind of the layer take it as an argument.
    by_kind = isinstance(getattr(base.rotary_emb, "rope_type", None), dict)
    blocks: list[nn.Module] = [
        Layer(layer, config, kind, copy.deepcopy(base.rotary_emb), *([kind] if by_kind else []))
        for layer, kind in zip(layers, kinds, strict=True)
    ]
    return [tokens], blocks, Head(norm, model.lm_head, cap=getattr(config, "final_logit_softcapping", None))


def _gpt2(model: Any) -> Parts:
    base = model.transformer
    blocks: list[nn.Module] = [Layer(layer, model.config, "full_attention") for layer in base.h]
    return [base.wte, base.wpe, base.drop], blocks, Head(base.ln_f, model.lm_head)


def _bert(model: Any) -> Parts:
    require(not model.config.is_decoder, "is_decoder", "false", True, ModelError)
    blocks: list[nn.Module] = [Layer(layer, model.config, "bidirectional") for layer in model.bert.encoder.layer]
    head = Head(model.cls) if hasattr(model, "cls") else Head(model.bert.pooler, model.dropout, model.classifier)
    return [model.bert.embeddings], blocks, head


def _vit(model: Any) -> Parts:
    blocks: list[nn.Module] = [Layer(layer, model.config, "bidirectional") for layer in model.vit.layers]
    return [model.vit.embeddings], blocks, Head(model.vit.layernorm, model.classifier, first=True)


SPLITTERS: dict[str, Callable[[Any], Parts]] = {
    **dict.fromkeys(DECODERS, _decoder),
    "GPT2LMHeadModel": _gpt2,
    "BertForMaskedLM": _bert,
    "BertForSequenceClassification": _bert,
    "ViTForImageClassification": _vit,
}
"""Functions that return embedding, layers and head, by the class of the model."""
