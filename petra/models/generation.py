"""Text from a language model: token by token, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from petra.errors import ModelError, check_types, invalid, require
from petra.models.attention import Attention, KeyValueCache

TEMPERATURES = (1e-100, 1e100)
"""Range in which float32 logits divided by a temperature do not overflow in float64."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits.

    Attributes:
        temperature: Divisor of the logits; 0 takes the most probable token.
        top_k: Draw among this number of most probable tokens; None: all.
        top_p: Draw among the fewest most probable tokens whose probabilities sum to at least this (nucleus sampling, Holtzman et
            al. 2020, section 3.1).

    Raises:
        ConfigError: If a value is out of range.
    """

    temperature: Annotated[float, ">= 0"] = 1.0
    top_k: Annotated[int | None, ">= 1"] = None
    top_p: Annotated[float, "> 0 and <= 1"] = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        low, high = TEMPERATURES
        fits = self.temperature == 0 or low <= self.temperature <= high
        require(fits, "temperature", f"0 for the most probable token, or a number from {low:g} to {high:g}", self.temperature)

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Return a token, drawn from logits (classes,).

        Raises:
            ModelError: If a logit is infinite or not a number.
        """
        largest = float(logits.max())  # not a number if one of them is not
        require(isfinite(largest), "weights", "those of a network with finite logits", largest, ModelError)
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities, tokens = (logits.double() / self.temperature).softmax(0).sort(descending=True, stable=True)
        if self.top_k is not None:
            probabilities[self.top_k :] = 0
        before = probabilities.cumsum(0) - probabilities
        probabilities[before >= self.top_p * probabilities.sum()] = 0
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


@torch.no_grad()
def generate(model: nn.Module, prompt: Sequence[int], sampling: Sampling, seed: int, stop: int | None = None) -> Iterator[int]:
    """Yield tokens after a prompt, without end unless ``stop`` is drawn.

    When the text reaches the model's context length, the model starts again from the last half of it. A model without layers of
    petra has no cache, and reads the whole text for every token.

    Args:
        model: Language model (:meth:`petra.Model.build`) in evaluation mode, on any device.
        prompt: Tokens of the prompt, at least one.
        sampling: How tokens are drawn.
        seed: Seed of the draws.
        stop: Token that ends the text, and is not yielded.

    Raises:
        ConfigError: If the prompt is empty or has other tokens than the model, or the model is not a language model.
    """
    require(len(prompt) >= 1, "prompt", "at least one token", "none")
    stem = find_stem(model)
    if stem is None:
        raise invalid("run", "a run of a language model", "a network without tokens")
    text, device, known = list(prompt), next(model.parameters()).device, range(stem.tokens.num_embeddings)
    require(all(token in known for token in text), "prompt", f"tokens less than {len(known)}", text)
    generator, layers = torch.Generator().manual_seed(seed), [m for m in model.modules() if isinstance(m, Attention)]
    while True:
        new = text[-(stem.size if len(text) == len(prompt) else (stem.size + 1) // 2) :]
        for layer in layers:
            layer.cache = KeyValueCache()
        try:
            stem.first = 0
            while stem.first + len(new) <= stem.size:
                logits = model(torch.tensor([new], device=device))[-1]
                stem.first += len(new) if layers else 0
                token = sampling.draw(logits.float().cpu(), generator)
                if token == stop:
                    return
                yield token
                text.append(token)
                new = [token] if layers else [*new, token]
        finally:
            stem.first = 0
            for layer in layers:
                layer.cache = None


def find_stem(model: nn.Module) -> Any:
    """Return the first block of a language model, which is like a ``TokenStem``; None for another model."""
    return next((m for m in model.modules() if hasattr(m, "size") and hasattr(m, "first")), None)
