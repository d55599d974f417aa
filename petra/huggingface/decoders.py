"""Layers of decoders, called as the model's own ``forward`` calls them.

Families differ in what their layers get: masks by the kind of the layer, rotary tables, scales. The ``forward`` of the model,
with stand-ins for its layers, computes these arguments in each block, so no family needs code of its own.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

from petra.errors import ModelError, require
from petra.huggingface.families import PLAN
from petra.huggingface.inputs import PADDING, attention_mask, positions
from petra.huggingface.outputs import Hidden

PLAIN = (bool, int, float, str, type(None))


class Body(nn.Module):
    """The ``forward`` of a decoder without the weights of its embedding, layers and norm.

    Args:
        base: The decoder below its head.
    """

    shell: Any

    def __init__(self, base: Any) -> None:
        super().__init__()
        shell = copy.copy(base)
        shell._modules = {name: copy.deepcopy(part) for name, part in base._modules.items() if name not in PLAN}
        shell._buffers = dict(base._buffers)
        weights = sorted({name.partition(".")[0] for name, _ in shell.named_parameters()})
        require(not weights, type(base).__name__, f"weights in {', '.join(PLAN)} only", ", ".join(weights), ModelError)
        plain = [{key: value for key, value in vars(layer).items() if isinstance(value, PLAIN)} for layer in base.layers]
        shell.__dict__["stands"] = plain
        self.shell = shell

    def arguments(self, i: int, hidden: Tensor, context: Tensor | None) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
        """Return what layer ``i`` gets: hidden states, other arguments, and named ones.

        Args:
            i: Number of the layer.
            hidden: The hidden states (B, T, D), from which the layers' other arguments take shape, type and device.
            context: The context (B, T) of the tokens, or None.
        """
        found: list[Any] = []

        def stand_in(number: int) -> Any:
            def call(states: Tensor, *others: Any, **named: Any) -> Tensor:
                if number == i:
                    found.append((states, others, named))
                return states

            return _StandIn(call, self.shell.stands[number])

        shell = self.shell
        shell.__dict__["layers"] = [stand_in(number) for number in range(len(shell.stands))]
        shell.__dict__["norm"] = lambda states, *others, **named: states
        try:
            index = positions(context) if context is not None else torch.arange(hidden.shape[1], device=hidden.device)[None]
            own_forward(shell)(shell, inputs_embeds=hidden, attention_mask=context, position_ids=index, use_cache=False)
        finally:
            del shell.__dict__["layers"], shell.__dict__["norm"]
        require(len(found) == 1, f"layer {i}", "one call in each forward", f"{len(found)}", ModelError)
        return found[0]  # type: ignore[no-any-return]


class Entrance(nn.Module):
    """What a decoder does to its embeddings before the first layer, such as a scale.

    Args:
        body: The decoder.
    """

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the input of the first layer (B, T, D) from embeddings (B, T, D)."""
        return self.body.arguments(0, hidden, None)[0]

    @classmethod
    def of(cls, base: Any) -> Entrance | None:
        """Return what a decoder does to its embeddings, or None if it does nothing."""
        made, known = cls(Body(base)), torch.ones(1, 2, base.config.hidden_size, device="cpu")
        return None if made(known) is known else made


class _StandIn:
    def __init__(self, call: Any, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)
        self.call = call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.call(*arguments, **named)


class Scale(nn.Module):
    """What the ``forward`` of a causal language model does to its logits, such as a scale or a cap.

    Args:
        model: The model. Its modules are not kept.
    """

    shell: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        shell = copy.copy(model)
        shell._modules = {}
        vars(shell).pop("forward", None)  # of what has wrapped the model
        self.shell, self.names = shell, (model.base_model_prefix, "lm_head")

    def forward(self, logits: Tensor) -> Tensor:
        """Return the logits (B, T, C) of the model from those of its last layer."""
        shell, (base, head) = self.shell, self.names
        call = _StandIn(lambda states: logits, {"weight": logits})  # asked for its type
        replaced = {base: lambda *others, **named: Hidden(logits), head: call}
        shell.__dict__.update(replaced)
        try:
            found: Tensor = own_forward(shell)(shell, inputs_embeds=logits, use_cache=False).logits
        finally:
            for name in replaced:
                del shell.__dict__[name]
        return found

    @classmethod
    def of(cls, model: Any) -> Scale | None:
        """Return what a model does to its logits, or None if it does nothing."""
        made, known = cls(model), torch.tensor([[[-2.0, 0.5, 3.0]]], device="cpu")
        return None if torch.equal(made(known), known) else made


def own_forward(model: Any) -> Any:
    """Return the ``forward`` of a model's class without its decorators, with the masks of this module."""
    return _own(type(model).forward)


@cache
def _own(function: Any) -> Any:
    raw: Any = inspect.unwrap(function)
    made = FunctionType(raw.__code__, {**raw.__globals__, **MASKS}, raw.__name__, raw.__defaults__, raw.__closure__)
    made.__kwdefaults__ = raw.__kwdefaults__
    return made


def _masked(name: str, *, window: str | None = None, chunk: str | None = None) -> Any:
    """Return a function in place of that of :mod:`transformers.masking_utils`. As its ``attention_mask`` it gets the context."""
    theirs = getattr(masking_utils, name)

    def mask(
        config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: Any = None, position_ids: Any = None, **more: Any
    ) -> Any:
        own = {key for key, value in more.items() if value is not None and key != "allow_is_causal_skip"}
        if attention_mask is None:
            return theirs(config, inputs_embeds, None, cache=None, **more)
        require(not own, "mask of attention", "one without functions of its own", ", ".join(own), ModelError)
        sizes: list[Any] = [getattr(config, key) if key else None for key in (window, chunk)]
        return mask_of(config, inputs_embeds, attention_mask, *sizes)

    return mask


def mask_of(
    config: Any, hidden: Tensor, context: Tensor, window: int | None, chunk: int | None = None, *, causal: bool = True
) -> Tensor:
    """Return the mask of attention in the form that the implementation of attention takes.

    Raises:
        ModelError: If the implementation takes other masks than ours.
    """
    name = config._attn_implementation
    fits = name in ("sdpa", "eager")
    require(fits, "attn_implementation", "sdpa or eager with padding or packed documents", name, ModelError)
    seen = attention_mask(context, causal=causal, window=window)
    if chunk is not None:
        part = (positions(context) - ((context != PADDING).cumsum(1) == 0).sum(1, keepdim=True)) // chunk
        seen = seen & (part[:, None, :, None] == part[:, None, None, :])
    if name == "sdpa":
        return seen
    lowest = torch.finfo(hidden.dtype).min  # added to the logits of attention
    return torch.zeros(seen.shape, dtype=hidden.dtype, device=seen.device).masked_fill(~seen, lowest)


def _recurrent(config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: Any = None, **more: Any) -> Tensor | None:
    return None if attention_mask is None else attention_mask != PADDING


MASKS: dict[str, Any] = {
    "create_causal_mask": _masked("create_causal_mask"),
    "create_sliding_window_causal_mask": _masked("create_sliding_window_causal_mask", window="sliding_window"),
    "create_chunked_causal_mask": _masked("create_chunked_causal_mask", chunk="attention_chunk_size"),
    "create_recurrent_attention_mask": _recurrent,
}
"""Functions that take the context of the tokens, and need no value from the device."""
