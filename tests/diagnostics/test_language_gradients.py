"""Comparison of gradients while a language model trains, with packed documents."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from petra import TensorSpec
from petra.diagnostics.gradient_quality import GradientQuality
from petra.models import revgpt
from tests.support.nets import make_pipeline

BATCH, LENGTH, WORDS, STAGES = 2, 12, 11, 4
ADAM = {"lr": 0.01, "betas": (0.9, 0.95)}


class Tokens:
    """Random documents; token 0 begins one."""

    def row(self, m: int) -> Tensor:
        return torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(m))

    def inputs(self, m: int) -> Tensor:
        return self.row(m)[:, :-1].contiguous()

    def targets(self, m: int) -> Tensor:
        return self.row(m)[:, 1:].flatten()


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), **ADAM)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.0, 0.01])
def test_cosines_to_the_exact_gradient(rate: float) -> None:
    """With constant weights all cosines are 1. In training, the last stage's is closer to 1 than the first's."""
    model = revgpt(WORDS, dim=16, depth=6, heads=2, kv_heads=1, mlp="swiglu", norm="rmsnorm", positions="rotary", delimiter=0)
    spec = TensorSpec((BATCH, LENGTH), torch.int64)
    pipeline = make_pipeline(model, spec, optimizer=adamw, stages=STAGES, k=2, learning_rate=lambda m: rate)
    with pipeline.hooks.attached(GradientQuality(pipeline, every=10)) as quality:
        pipeline.train(Tokens(), 30)
    rows = [row for row in quality.rows if row["microbatch"] == 20]
    cosines = {int(row["stage"]): row["cosine_end_to_end"] for row in rows}
    assert set(cosines) == set(range(1, STAGES + 1))
    if rate == 0:
        assert min(cosines.values()) > 1 - 1e-5
        return
    assert cosines[1] < cosines[STAGES] < 1  # the last stage's input comes from older weights
