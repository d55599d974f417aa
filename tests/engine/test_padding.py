"""Evaluations in batches that do not divide the test samples: loss and metrics are those of the samples, whatever their kind."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from petra import BlockSpec, Losses, Model, ModelError, Pipeline, Recipe, TensorSpec
from petra.data import EvalSource, from_dataset
from petra.models.head_loss import LinearCrossEntropy, without_logits
from petra.specs import IGNORED
from tests.support.nets import sgd
from tests.support.processes import run_processes

CLASSES = 4
OWN: dict[str, tuple[Any, Any]] = {
    "classes": (F.cross_entropy, lambda o, t: (o.argmax(1) != t).sum()),
    "multi-label": (lambda o, t: F.binary_cross_entropy_with_logits(o, t.double()), lambda o, t: ((o > 0) != t).sum()),
    "counts": (lambda o, t: F.mse_loss(o[:, 0], t.double()), lambda o, t: (o[:, 0] - t).abs().sum()),
    "numbers": (lambda o, t: F.l1_loss(o[:, 0], t), lambda o, t: (o[:, 0] - t).square().sum()),
    "booleans": (lambda o, t: F.binary_cross_entropy_with_logits(o[:, 0], t.double()), lambda o, t: ((o[:, 0] > 0) == t).sum()),
}
"""Loss and metric by kind of target. None of them knows of -100."""


def targets_of(kind: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    if kind == "multi-label":
        return torch.randint(2, (count, CLASSES), generator=generator)
    if kind == "numbers":
        return torch.randn(count, dtype=torch.float64, generator=generator)
    return torch.randint(2 if kind == "booleans" else CLASSES, (count,), generator=generator).to(
        torch.bool if kind == "booleans" else torch.int64
    )


def model() -> Model:
    return Model("m", (BlockSpec("a", lambda: nn.Linear(3, 5).double()), BlockSpec("b", lambda: nn.Linear(5, CLASSES).double())))


def evaluated(kind: str, count: int, batch: int, dp: int = 1) -> tuple[Any, Any]:
    """Return what an evaluation finds, and the same of all samples at once, with plain torch."""
    x = torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets, (loss, metric) = targets_of(kind, count), OWN[kind]
    source = EvalSource(from_dataset(list(zip(x, targets, strict=True))), batch_size=batch)
    recipe = Recipe(sgd, loss=Losses(F.cross_entropy, loss), metrics={"own": metric})
    pipeline = Pipeline(model(), TensorSpec((batch, 3), torch.float64), recipe, dp=dp, stages=1)
    found = pipeline.evaluate(source, source.batches)
    with torch.no_grad():
        output = model().build(0)(x)
    expected = loss(output, targets).item(), float(metric(output, targets)), targets.numel()
    return (found.loss, found.metrics["own"] * found.targets, found.targets), pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", OWN)
def test_padding_reaches_neither_loss_nor_metrics(kind: str) -> None:
    found, expected = evaluated(kind, 11, 4)
    assert found == expected


@given(st.sampled_from(sorted(OWN)), st.integers(1, 13), st.integers(1, 6))
def test_any_batch_size_gives_the_numbers_of_all_samples(kind: str, count: int, batch: int) -> None:
    """Draws the kind of the targets (classes, several labels, counts, numbers, booleans), the test samples, and the batch size."""
    found, expected = evaluated(kind, count, batch)
    assert found == expected


def evaluate_shares(rank: int) -> list[Any]:
    return [evaluated(kind, count, 6, dp=2) for kind in OWN for count in (7, 10)]


def test_replicas_leave_out_padding_too(tmp_path: Path) -> None:
    """Of the last microbatch, the second replica has padding only, or in part."""
    for results in run_processes(2, evaluate_shares, tmp_path):
        for found, expected in results:
            assert found == expected


def test_real_rows_may_have_no_targets_at_all() -> None:
    """A metric that counts rows sees every sample, also those whose targets are -100, and no padding."""
    seen = []
    x, targets = torch.zeros(5, 3, dtype=torch.float64), torch.tensor([1, IGNORED, 2, IGNORED, IGNORED])
    source = EvalSource(from_dataset(list(zip(x, targets, strict=True))), batch_size=3)
    recipe = Recipe(sgd, metrics={"rows": lambda o, t: seen.append((len(o), t.tolist())) or (t >= 0).sum()})
    assert Pipeline(model(), TensorSpec((3, 3), torch.float64), recipe).evaluate(source, 2).targets == 2
    assert seen == [(3, [1, IGNORED, 2]), (2, [IGNORED, IGNORED])]


def test_rows_of_tokens_and_weights_among_the_outputs() -> None:
    """Targets (B·T) and outputs (B·T, D) lose the rows of padding sequences; a weight of as many rows stays whole."""
    x = torch.randint(6, (3, 4), generator=torch.Generator().manual_seed(0))
    targets = torch.randint(8, (12,), generator=torch.Generator().manual_seed(1))
    source = SimpleNamespace(
        batch_size=2,
        real_rows=lambda m: 2 - m,
        inputs=lambda m: x[[0, 1]] if m == 0 else x[[2, 2]],
        targets=lambda m: targets[:8] if m == 0 else targets[8:].repeat(2),
    )
    flat = Model(
        "m",
        (
            BlockSpec("a", lambda: nn.Embedding(6, 5).double()),
            BlockSpec("b", lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(5, 8)).double()),
        ),
    )
    with torch.no_grad():
        expected = F.cross_entropy(flat.build(0)(x), targets).item()
    for net, loss in ((flat, lambda o, t: F.cross_entropy(o, t)), (without_logits(flat), LinearCrossEntropy())):
        pipeline = Pipeline(net, TensorSpec((2, 4), torch.int64), Recipe(sgd, loss=loss, metrics={}))
        assert pipeline.evaluate(source, 2).loss == pytest.approx(expected, rel=1e-12)


def test_outputs_without_a_row_for_each_sample_are_refused() -> None:
    """Sequence first: to leave out rows of the first dimension would leave out tokens."""
    first = Model("m", (BlockSpec("a", lambda: nn.Linear(3, CLASSES).double()), BlockSpec("b", Transposed)))
    source = SimpleNamespace(
        batch_size=2,
        real_rows=lambda m: 1,
        inputs=lambda m: torch.zeros(2, 5, 3, dtype=torch.float64),
        targets=lambda m: torch.zeros(2, 5, dtype=torch.long),
    )
    loss = Losses(F.cross_entropy, lambda o, t: F.cross_entropy(o.transpose(0, 1).flatten(0, 1), t.flatten()))
    pipeline = Pipeline(first, TensorSpec((2, 5, 3), torch.float64), Recipe(sgd, loss=loss, metrics={}))
    with pytest.raises(ModelError, match=r"^output of the last block: expected 2 or 2 rows, .*, got float64\[5, 2, 4\]"):
        pipeline.evaluate(source, 1)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)
