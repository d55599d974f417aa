"""Blocks around the modules of ``transformers``: embedding, layer, head. The modules inside are those of the model, unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_sliding_window_causal_mask

from petra.errors import ModelError, require
from petra.huggingface.inputs import attention_mask, context_of, positions
from petra.specs import Streams

MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
    "bidirectional": create_bidirectional_mask,
}
"""Functions of ``transformers`` that make the mask of a layer whose rows are documents without padding."""


class Embedding(nn.Module):
    """First block of a model of tokens. Maps int64 inputs (:func:`petra.huggingface.stack`) to (B, T, D), and a context (B, T).

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
        return (hidden,) if context is None else (hidden, context.to(hidden.dtype))


class Layer(nn.Module):
    """One layer. Maps (B, T, D) and the context, if any, to the same.

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

    def forward(self, hidden: Tensor, *context: Tensor) -> Streams:
        arguments: dict[str, Any] = {"attention_mask": self._mask(hidden, *context)}
        if self.rotary is not None:
            index = positions(context[0]) if context else torch.arange(hidden.shape[1], device=hidden.device)[None]
            arguments["position_embeddings"] = self.rotary(hidden, index, *self.arguments)
        return self.layer(hidden, **arguments), *context

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
        columns = [name for name, way in plan.items() if way == "colwise"]
        sizes: dict[str, Any] = {name: self.layer.get_submodule(name).out_features for name in columns}
        return {f"layer.{name}": (sizes[name],) if name in sizes else way for name, way in plan.items()}

    def _mask(self, hidden: Tensor, context: Tensor | None = None) -> Tensor | None:
        """Return the mask of attention in the form that the implementation of attention takes.

        Raises:
            ModelError: If there is a context, and the implementation takes other masks than ours.
        """
        if context is None:
            mask: Tensor | None = MASKS[self.mask](self.config, hidden, None, cache=None)
            return mask
        name = self.config._attn_implementation
        require(name == "sdpa", "attn_implementation", "sdpa with padding or packed documents", name, ModelError)
        window = self.config.sliding_window if self.mask == "sliding_attention" else None
        return attention_mask(context, causal=self.mask != "bidirectional", window=window)


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
