"""Blocks around the modules of ``transformers``, which are those of the model, unchanged: which modules make which block.

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

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_sliding_window_causal_mask

from petra.errors import ModelError, alternatives, invalid, require
from petra.huggingface.inputs import FIELDS, attention_mask, context_of, positions
from petra.specs import Streams

DECODERS = tuple(f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3"))
"""Classes of the decoders that have a ``base_model_pp_plan`` and are tested. SmolLM and SmolLM2 are Llama."""
PLAN = ("embed_tokens", "layers", "norm")
"""Modules in the ``base_model_pp_plan`` of a decoder."""
MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
    "bidirectional": create_bidirectional_mask,
}
"""Functions of ``transformers`` that make the mask of a layer whose rows are documents without padding."""


def kind_of(model: Any) -> str:
    """Return ``bert`` or ``vit``, or ``causal`` for a language model whose tokens attend to earlier ones only."""
    name = type(model).__name__
    return "bert" if name.startswith("Bert") else "vit" if name.startswith("ViT") else "causal"


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
    kind = kind_of(model)
    accepted = {"causal": FIELDS[:3], "bert": (FIELDS[0], FIELDS[1], FIELDS[3]), "vit": FIELDS[:1]}[kind]
    unknown = [field for field in fields if field not in accepted]
    require(not unknown, "fields", f"those of {name}: {', '.join(accepted)}", ", ".join(unknown), ModelError)
    tokens = range(model.config.vocab_size if kind == "causal" else 0)
    require(delimiter is None or delimiter in tokens, "delimiter", f"None or one of {len(tokens)} tokens", delimiter, ModelError)
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
    found: Any = getattr(base.rotary_emb, "rope_type", None)
    by_kind = isinstance(found, dict)  # tables of rotation that depend on the kind of the layer take it as an argument
    for each in found.values() if by_kind else [found]:
        expected = "one whose tables depend on positions only, such as default, linear, yarn or llama3"
        require("dynamic" not in str(each) and each != "longrope", "rope_type", expected, each, ModelError)
    one = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [one] * len(layers)
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


class Embedding(nn.Module):
    """First block of a model of tokens. Maps int64 inputs (:func:`petra.huggingface.stack`) to (B, T, D), and a context (B, T),
    a side tensor.

    Args:
        tokens: Embedding of tokens; with ``whole``, of all fields by name (BERT).
        config: Configuration of the model.
        fields: Names of the rows of the inputs.
        delimiter: Token with which every document begins, or None.
        learned: Embedding of positions and dropout, of a model that adds them (GPT-2).
        whole: Whether ``tokens`` takes the fields by name.

    Attributes:
        size, first: Largest T, and position of the first token, for the generation of text.
    """

    def __init__(
        self, tokens: nn.Module, config: Any, fields: Sequence[str], delimiter: int | None, *learned: nn.Module, whole: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.learned, self.whole = tokens, nn.ModuleList(learned), whole
        self.fields, self.delimiter, self.size, self.first = tuple(fields), delimiter, config.max_position_embeddings, 0

    def forward(self, inputs: Tensor) -> Streams:
        rows = dict(zip(self.fields, inputs.unbind(1) if len(self.fields) > 1 else [inputs], strict=True))
        context, tokens = context_of(rows, self.delimiter), rows["input_ids"]
        names = {"input_ids", "token_type_ids"} & rows.keys()
        hidden: Tensor = self.tokens(**{name: rows[name] for name in names}) if self.whole else self.tokens(tokens)
        if self.learned:
            embed, dropout = self.learned
            index = torch.arange(tokens.shape[1], device=tokens.device)[None] if context is None else positions(context)
            hidden = dropout(hidden + embed(index))
        return (hidden,) if context is None else (hidden, context.to(torch.int8))


class Layer(nn.Module):
    """One layer. Maps (B, T, D) and the context, if any, to the same, and passes other side tensors on.

    Args:
        layer: The layer.
        config: Configuration of the model.
        mask: Key of :data:`MASKS`.
        rotary: Module that computes the rotary tables from the positions, of this block alone; None for layers without.
        rotary_arguments: Further arguments of ``rotary``.
    """

    def __init__(self, layer: nn.Module, config: Any, mask: str, rotary: nn.Module | None = None, *rotary_arguments: Any) -> None:
        super().__init__()
        self.layer, self.config, self.mask, self.rotary, self.arguments = layer, config, mask, rotary, rotary_arguments

    def forward(self, hidden: Tensor, *side: Tensor) -> Streams:
        context = [t for t in side if t.dim() == 2]
        arguments: dict[str, Any] = {"attention_mask": self._mask(hidden, *context)}
        if self.rotary is not None:
            index = positions(context[0]) if context else torch.arange(hidden.shape[1], device=hidden.device)[None]
            arguments["position_embeddings"] = self.rotary(hidden, index, *self.arguments)
        return self.layer(hidden, **arguments), *side

    def divisible(self, tp: int) -> dict[str, tuple[int, ...] | str]:
        """Return how ``tp`` processes divide the layer, by the ``base_model_tp_plan`` of ``transformers``.

        Raises:
            ConfigError, ModelError: If they can't.
        """
        config, plan = self.config, {k.partition(".*.")[2]: v for k, v in (self.config.base_model_tp_plan or {}).items()}
        require(bool(plan), "tp", f"1 for {config.model_type}, which has no base_model_tp_plan", tp, ModelError)
        heads, dropout = getattr(config, "num_key_value_heads", 1), getattr(config, "attention_dropout", 0.0)
        require(heads % tp == 0, "tp", f"a divisor of {heads}, the number of key and value heads", tp)
        require(dropout == 0, "attention_dropout", "0 with tp, as attention weights differ between processes", dropout)
        named = [name.rpartition(".")[0] for name, _ in self.layer.named_parameters() if name.startswith(("self_attn.", "mlp."))]
        other = [name for name in named if name not in plan]
        require(not other, "tp", "1 with layers that the base_model_tp_plan lacks, such as adapters", ", ".join(other), ModelError)
        layers: dict[str, Any] = {name: self.layer.get_submodule(name) for name in plan}
        return {f"layer.{name}": (layers[name].out_features,) if way == "colwise" else way for name, way in plan.items()}

    def _mask(self, hidden: Tensor, context: Tensor | None = None) -> Tensor | None:
        """Return the mask of attention in the form that the implementation of attention takes.

        Raises:
            ModelError: If there is a context, and the implementation takes other masks than ours.
        """
        if context is None:
            mask: Tensor | None = MASKS[self.mask](self.config, hidden, None, cache=None)
            return mask
        name = self.config._attn_implementation
        fits = name in ("sdpa", "eager")
        require(fits, "attn_implementation", "sdpa or eager with padding or packed documents", name, ModelError)
        window = self.config.sliding_window if self.mask == "sliding_attention" else None
        seen = attention_mask(context, causal=self.mask != "bidirectional", window=window)
        if name == "sdpa":
            return seen
        lowest = torch.finfo(hidden.dtype).min  # added to the logits of attention
        return torch.zeros(seen.shape, dtype=hidden.dtype, device=seen.device).masked_fill(~seen, lowest)


class Head(nn.Module):
    """Last block: modules one after another, from (B, T, D) to the input of the loss. The context is not used.

    Args:
        modules: The modules.
        first: Whether they take the vectors (B, D) of the first positions only.
        cap: Largest absolute value of a logit, c · tanh(logit / c) (Gemma 2); None: no limit.
    """

    def __init__(self, *modules: nn.Module, first: bool = False, cap: float | None = None) -> None:
        super().__init__()
        self.parts, self.first, self.cap = nn.ModuleList(modules), first, cap

    def forward(self, hidden: Tensor, *context: Tensor) -> Tensor:
        x = hidden[:, 0] if self.first else hidden
        for part in self.parts:
            x = part(x)
        x = x if self.cap is None else torch.tanh(x / self.cap) * self.cap
        return x.flatten(0, -2)
