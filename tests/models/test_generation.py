"""Generation of text: greedy text equals that of the plain module, and samples have the frequencies of the distribution."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from petra.errors import ConfigError, ModelError
from petra.models import gpt, revgpt, revvit
from petra.models.attention import Attention
from petra.models.generation import Sampling, generate
from petra.models.language import COUPLINGS, POSITIONS
from tests.models.test_language import MODERN

SIZE, CLASSES = 12, 9
SHAPE = {"classes": CLASSES, "dim": 16, "depth": 2, "heads": 4, "size": SIZE}
SHAPES = {"modern": {key: value for key, value in MODERN.items() if key != "positions"}, "gpt2": {}}
FORMS = [(name, positions) for name in ("gpt", *COUPLINGS) for positions in POSITIONS]
PROMPTS = [3, 0, 4, 1], [0, 3, 1, 0], [0, 0, 2], [2, 1, 0, 5, 0, 7, 3]


@pytest.mark.parametrize(("i", "form", "positions"), [(i, *form) for i, form in enumerate(FORMS)])
def test_logits_of_a_text_are_those_of_training(i: int, form: str, positions: str) -> None:
    """Token by token with a cache, or at once without. Positions attend to their own document, if there are several."""
    shape = {**SHAPE, **[*SHAPES.values()][i // 2 % 2], "size": 16, "positions": positions, "delimiter": None if i % 3 == 0 else 0}
    model = (gpt(**shape) if form == "gpt" else revgpt(**shape, coupling=form)).build(3).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    given, prompt = list[torch.Tensor](), PROMPTS[i % 4]
    with model.get_submodule("head").register_forward_hook(lambda head, x, logits: given.append(logits[-1])):
        found = list(islice(generate(model, prompt, Sampling(0), seed=0), 9))
    logits = model(torch.tensor([prompt + found[:-1]]))[len(prompt) - 1 :]
    torch.testing.assert_close(torch.stack(given), logits, rtol=1e-9, atol=1e-9)
    assert found == logits.argmax(1).tolist()
    assert all(layer.cache is None for layer in model.modules() if isinstance(layer, Attention))


def test_text_longer_than_the_context_starts_again_from_its_last_half() -> None:
    model = revgpt(**SHAPE, **MODERN, delimiter=0).build(1).eval()
    found = [5, *islice(generate(model, [5], Sampling(0), 0), 30)]
    again = list(islice(generate(model, found[SIZE - 5 : SIZE + 1], Sampling(0), 0), 5))
    assert found[SIZE + 1 : SIZE + 6] == again


def frequencies(sampling: Sampling) -> torch.Tensor:
    logits = torch.tensor([0.5, 0.1, 0.3, 0.1]).log()
    generator = torch.Generator().manual_seed(0)
    return torch.bincount(torch.tensor([sampling.draw(logits, generator) for _ in range(4000)]), minlength=4) / 4000


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.1, 0.3, 0.1]),
        (Sampling(temperature=0), [1, 0, 0, 0]),
        (Sampling(temperature=0.5), [0.25 / 0.36, 0.01 / 0.36, 0.09 / 0.36, 0.01 / 0.36]),
        (Sampling(top_k=2), [0.625, 0, 0.375, 0]),
        (Sampling(top_k=1), [1, 0, 0, 0]),
        (Sampling(top_p=0.6), [0.625, 0, 0.375, 0]),
        (Sampling(top_p=0.4), [1, 0, 0, 0]),
        (Sampling(top_p=0.85), [0.5 / 0.9, 0.1 / 0.9, 0.3 / 0.9, 0]),
    ],
)
def test_frequencies_of_samples(sampling: Sampling, expected: list[float]) -> None:
    torch.testing.assert_close(frequencies(sampling), torch.tensor(expected, dtype=torch.float32), atol=0.03, rtol=0)


def test_the_seed_decides_the_text_and_the_stop_token_ends_it() -> None:
    model = revgpt(**SHAPE).build(1).eval()
    texts = [list(islice(generate(model, [5], Sampling(), seed), 30)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    stop = texts[0][7]
    assert list(generate(model, [5], Sampling(), 1, stop)) == texts[0][: texts[0].index(stop)]


def test_invalid_use() -> None:
    with pytest.raises(ConfigError, match="prompt: expected at least one token"):
        next(generate(revgpt(**SHAPE).build(0), [], Sampling(), 0))
    with pytest.raises(ConfigError, match="run: expected a run of gpt or revgpt"):
        next(generate(revvit().build(0), [1], Sampling(), 0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_network_whose_logits_are_not_finite_is_refused(value: float) -> None:
    """Such as one that has diverged. Without a check, the most probable token would be that of the value."""
    for temperature in (0.0, 1.0):
        with pytest.raises(ModelError, match=f"weights: expected those of a network with finite logits, got {value}"):
            Sampling(temperature).draw(torch.tensor([0.0, value, 1.0]), torch.Generator())


def test_extreme_temperatures_draw_tokens() -> None:
    """The smallest takes the most probable token, the largest draws all tokens equally often."""
    logits, generator = torch.tensor([3e38, 0.0, 2e38]), torch.Generator().manual_seed(0)
    assert {Sampling(1e-100).draw(logits, generator) for _ in range(20)} == {0}
    assert {Sampling(1e100).draw(logits, generator) for _ in range(50)} == {0, 1, 2}
