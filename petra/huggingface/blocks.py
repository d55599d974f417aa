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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from petra.errors import ModelError, alternatives, invalid, require
from petra.huggingface.decoders import Body, Entrance, Scale, mask_of
from petra.huggingface.families import COMMAND, DECODERS, OTHERS, REFUSED
from petra.huggingface.inputs import FIELDS, context_of, positions
from petra.specs import Streams


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
        known = alternatives([each for each in SPLITTERS if each not in DECODERS])
        reason = (REFUSED | OTHERS).get(name, f"not checked: {COMMAND} {name}" if name.endswith("ForCausalLM") else "")
        expected = f"a decoder that {COMMAND} has found equal, such as LlamaForCausalLM, or {known}"
        raise invalid("model", expected, f"{name} ({reason})" if reason else name, ModelError)
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


def decoder(model: Any) -> Parts:
    config, base = model.config, getattr(model, model.base_model_prefix)
    bidirectional = getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True)
    require(not bidirectional, "use_bidirectional_attention", "false", bidirectional, ModelError)
    for rotary in (module for module in base.children() if hasattr(module, "rope_type")):
        for each in rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]:
            expected = "one whose tables depend on positions only, such as default, linear, yarn or llama3"
            require("dynamic" not in str(each) and each != "longrope", "rope_type", expected, each, ModelError)
    routed = getattr(config, "output_router_logits", None)
    expected = "false: a loss of the routers of all layers is not computed (router_aux_loss_coef=0 in SFTConfig)"
    require(not routed, "output_router_logits", expected, routed, ModelError)
    blocks: list[nn.Module] = [DecoderLayer(layer, Body(base), i) for i, layer in enumerate(base.layers)]
    enter = Entrance.of(base)
    return [base.embed_tokens, *([] if enter is None else [enter])], blocks, Head(base.norm, model.lm_head, scale=Scale.of(model))


def _gpt2(model: Any) -> Parts:
    base = model.transformer
    blocks: list[nn.Module] = [Layer(layer, model.config, causal=True) for layer in base.h]
    return [base.wte, base.wpe, base.drop], blocks, Head(base.ln_f, model.lm_head)


def _bert(model: Any) -> Parts:
    require(not model.config.is_decoder, "is_decoder", "false", True, ModelError)
    blocks: list[nn.Module] = [Layer(layer, model.config, causal=False) for layer in model.bert.encoder.layer]
    head = Head(model.cls) if hasattr(model, "cls") else Head(model.bert.pooler, model.dropout, model.classifier)
    return [model.bert.embeddings], blocks, head


def _vit(model: Any) -> Parts:
    blocks: list[nn.Module] = [Layer(layer, model.config, causal=False) for layer in model.vit.layers]
    return [model.vit.embeddings], blocks, Head(model.vit.layernorm, model.classifier, first=True)


SPLITTERS: dict[str, Callable[[Any], Parts]] = {
    **dict.fromkeys(DECODERS, decoder),
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
        learned: Embedding of positions and dropout, of a model that adds them (GPT-2); or what else acts on embeddings.
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
        if not any(p.requires_grad for p in self.tokens.parameters()):
            hidden = hidden.detach()  # a hook of enable_input_require_grads may have asked for gradients that nobody needs
        if len(self.learned) == 1:
            hidden = self.learned[0](hidden)
        elif self.learned:
            embed, dropout = self.learned
            index = torch.arange(tokens.shape[1], device=tokens.device)[None] if context is None else positions(context)
            hidden = dropout(hidden + embed(index))
        return (hidden,) if context is None else (hidden, context.to(torch.int8))


class Layer(nn.Module):
    """One layer. Maps (B, T, D) and the context, if any, to the same, and passes other side tensors on.

    Args:
        layer: The layer.
        config: Configuration of the model.
        causal: Whether tokens attend to earlier ones only.
    """

    def __init__(self, layer: nn.Module, config: Any, *, causal: bool) -> None:
        super().__init__()
        self.layer, self.config, self.causal = layer, config, causal

    def forward(self, hidden: Tensor, *side: Tensor) -> Streams:
        context = next((t for t in side if t.dim() == 2), None)
        others, named = self._arguments(hidden, context)
        return self.layer(hidden, *others, **named), *side

    def _arguments(self, hidden: Tensor, context: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the layer gets besides the hidden states."""
        if context is not None:
            return (), {"attention_mask": mask_of(self.config, hidden, context, None, causal=self.causal)}
        make = create_causal_mask if self.causal else create_bidirectional_mask
        return (), {"attention_mask": make(self.config, hidden, None, cache=None)}

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


class DecoderLayer(Layer):
    """One layer of a decoder, which gets what the model's own ``forward`` gives it.

    Args:
        layer: The layer.
        body: What computes its arguments, of this block alone.
        index: Number of the layer.
    """

    def __init__(self, layer: nn.Module, body: Body, index: int) -> None:
        super().__init__(layer, body.shell.config, causal=True)
        self.body, self.index = body, index

    def forward(self, hidden: Tensor, *side: Tensor) -> Streams:
        with _experts_of(self.config, "batched_mm") if hidden.is_meta else nullcontext():  # others read numbers of tokens
            return super().forward(hidden, *side)

    def _arguments(self, hidden: Tensor, context: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.body.arguments(self.index, hidden, context)[1:]


@contextmanager
def _experts_of(config: Any, implementation: str) -> Iterator[None]:
    own = config._experts_implementation
    config._experts_implementation = implementation
    try:
        yield
    finally:
        config._experts_implementation = own


class Head(nn.Module):
    """Last block: modules one after another, from (B, T, D) to the input of the loss. The context is not used.

    Args:
        modules: The modules.
        first: Whether they take the vectors (B, D) of the first positions only.
        scale: What the model does to its logits after the modules, if anything.
    """

    def __init__(self, *modules: nn.Module, first: bool = False, scale: Scale | None = None) -> None:
        super().__init__()
        self.parts, self.first, self.scale = nn.ModuleList(modules), first, scale

    def forward(self, hidden: Tensor, *context: Tensor) -> Tensor:
        x = hidden[:, 0] if self.first else hidden
        for part in self.parts:
            x = part(x)
        x = x if self.scale is None else self.scale(x)
        return x.flatten(0, -2)
