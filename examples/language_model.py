"""A reversible language model on a text: ``python examples/language_model.py [FILE]``, by default on Python's own help texts.

The tokens are the bytes of the file. After training, the model continues a few words.
"""

from __future__ import annotations

import pydoc_data.topics
import sys
from pathlib import Path

import torch
from torch import nn

from petra import METHODS, Pipeline, Recipe, TensorSpec
from petra.data import EvalSource, TrainSource, load_dataset
from petra.models import revgpt
from petra.training import OPTIMIZERS, Cosine

WINDOW, BATCH = 64, 16


def main(file: Path = Path(pydoc_data.topics.__file__), microbatches: int = 600) -> float:
    """Train a reversible GPT in four stages, continue a text, and return the test loss (nats per byte)."""
    torch.set_num_threads(1)
    text = load_dataset("text", root=file, size=WINDOW)
    train, test = TrainSource(text, batch_size=BATCH, seed=0), EvalSource(text, batch_size=BATCH)
    model = revgpt(dim=96, depth=4, heads=4, size=WINDOW)
    pipeline = Pipeline(
        model,
        TensorSpec((BATCH, WINDOW), torch.int64),
        Recipe(OPTIMIZERS["adamw"], Cosine(2e-3, microbatches, epochs=1, warmup_epochs=0.1)),
        method=METHODS["petra"],
        k=4,
        stages=4,
    )
    for done in range(0, microbatches, part := max(1, microbatches // 4)):
        result = pipeline.train(train, part)
        print(f"after {done + part} microbatches: loss {result.loss:.3f} nats per byte")
    tested = pipeline.evaluate(test, min(test.batches, 100))
    print(f"test loss {tested.loss:.3f} nats per byte (a uniform guess: 5.545)")
    trained = model.build(seed=0)
    trained.load_state_dict(pipeline.state_dict())
    print(continued(trained, "The following ", 200))
    return tested.loss


@torch.no_grad()
def continued(model: nn.Module, start: str, count: int) -> str:
    """Return ``start`` and ``count`` further bytes, drawn from the model's distribution at temperature 0.7."""
    generator = torch.Generator().manual_seed(0)
    tokens = list(start.encode())
    for _ in range(count):
        window = tokens[-WINDOW:]
        padded = torch.tensor([window + [0] * (WINDOW - len(window))])
        logits = model(padded)[len(window) - 1]
        tokens.append(int(torch.multinomial((logits / 0.7).softmax(0), 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
