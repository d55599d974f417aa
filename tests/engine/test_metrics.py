"""Metrics that are vectors of counts, and their sums over stages and microbatches."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import Tensor, nn

from petra import ModelError, Pipeline, TensorSpec
from petra.data import EvalSource, Split
from petra.engine.metrics import correct_predictions
from petra.inplace_abn import ConfusionMatrix
from petra.model import BlockSpec, Model
from petra.specs import IGNORED
from tests.support.nets import make_pipeline, sgd

CLASSES = 5
METRICS = {"accuracy": correct_predictions, "miou": ConfusionMatrix(CLASSES)}


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
    counts = METRICS["miou"](output, targets)
    matrix, miou = expected_miou(targets, output.argmax(1))
    assert counts.dtype == torch.int64
    assert counts.tolist() == matrix
    assert ConfusionMatrix(CLASSES).value(matrix) == pytest.approx(miou, rel=1e-12)
    assert math.isnan(ConfusionMatrix(CLASSES).per_class(matrix)[-1]) == (classes == 2)


def test_targets_must_be_classes_and_the_miou_of_none_is_0() -> None:
    counts = METRICS["miou"](torch.randn(1, CLASSES, 2, 2), torch.full((1, 2, 2), IGNORED))
    assert counts.sum() == ConfusionMatrix(CLASSES).value(counts.tolist()) == 0
    with pytest.raises(ModelError, match="metric miou"):
        METRICS["miou"](torch.randn(1, CLASSES, 2, 2), torch.randn(1, 2, 2))


def pixel_model() -> Model:
    first, scores = (partial(nn.Conv2d, 3, outputs, 1, dtype=torch.float64) for outputs in (3, CLASSES))
    return Model("pixels", (BlockSpec("first", first), BlockSpec("scores", scores)))


def pixel_split(count: int) -> Split:
    generator = torch.Generator().manual_seed(3)
    images, targets = torch.randn(count, 3, 6, 8, generator=generator, dtype=torch.float64), random_targets(count, 2)
    return Split(count, lambda indices, seed: images[indices], lambda indices, seed: targets[indices])


def pixel_pipeline(batch: int, dp: int = 1) -> Pipeline:
    spec = TensorSpec((batch, 3, 6, 8), torch.float64)
    return make_pipeline(pixel_model(), spec, optimizer=partial(sgd, lr=0.0), dp=dp, metrics=METRICS)


@pytest.mark.parametrize("batch", [1, 4])
def test_evaluation_is_exact_for_any_batch_size(batch: int) -> None:
    """10 images: the last microbatch of 4 is padded. Both sizes give the counts of one pass over all images."""
    split = pixel_split(10)
    pipeline, source = pixel_pipeline(batch), EvalSource(split, batch)
    result = pipeline.evaluate(source, source.batches)
    everything = torch.arange(10)
    network = pixel_model().build(0)
    output, targets = network(split.inputs(everything, None)), split.targets(everything, None)
    matrix, miou = expected_miou(targets, output.argmax(1))
    assert result.counts == {"miou": matrix}
    assert result.metrics["miou"] == pytest.approx(miou, rel=1e-12)
    assert result.metrics["accuracy"] == pytest.approx(float((output.argmax(1) == targets).sum()) / result.targets)
    assert result.targets == int((targets != IGNORED).sum())
