"""Metrics that are vectors of counts. Their sums over microbatches: tests/launch/test_predict.py."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import Tensor

from petra import ModelError
from petra.inplace_abn import ConfusionMatrix
from petra.specs import IGNORED

CLASSES = 5
MIOU = ConfusionMatrix(CLASSES)


def expected_miou(targets: Tensor, predictions: Tensor) -> tuple[list[int], float]:
    """Return the confusion matrix of scikit-learn, row by row, and the mIoU computed from it."""
    counted = (targets != IGNORED).numpy()
    matrix = confusion_matrix(targets.numpy()[counted], predictions.numpy()[counted], labels=range(CLASSES))
    unions = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
    return matrix.flatten().tolist(), float(np.mean(matrix.diagonal()[unions > 0] / unions[unions > 0]))


def random_targets(count: int, seed: int, classes: int = CLASSES) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (count, 6, 8), generator=generator)
    return targets.masked_fill(torch.rand(targets.shape, generator=generator) < 0.3, IGNORED)


@pytest.mark.parametrize("classes", [CLASSES, 2])
def test_confusion_matrix_equals_scikit_learns(classes: int) -> None:
    """With targets of two of five classes, the other classes are wrong predictions only, or don't occur."""
    output, targets = torch.randn(4, CLASSES, 6, 8), random_targets(4, 1, classes)
    output[:, -1] = -9.0  # this class is never predicted
    counts = MIOU(output, targets)
    matrix, miou = expected_miou(targets, output.argmax(1))
    assert counts.dtype == torch.int64
    assert counts.tolist() == matrix
    assert MIOU.value(matrix) == pytest.approx(miou, rel=1e-12)
    assert math.isnan(MIOU.per_class(matrix)[-1]) == (classes == 2)


def test_targets_must_be_classes_and_the_miou_of_none_is_0() -> None:
    counts = MIOU(torch.randn(1, CLASSES, 2, 2), torch.full((1, 2, 2), IGNORED))
    assert counts.sum() == MIOU.value(counts.tolist()) == 0
    with pytest.raises(ModelError, match="metric miou"):
        MIOU(torch.randn(1, CLASSES, 2, 2), torch.randn(1, 2, 2))
    with pytest.raises(ModelError, match="metric miou: expected scores of 5 classes, got 6"):
        MIOU(torch.randn(1, CLASSES + 1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.int64))
    many, targets = ConfusionMatrix(20), torch.arange(20)
    assert many(torch.eye(20), targets.to(torch.uint8)).tolist() == many(torch.eye(20), targets).tolist()
