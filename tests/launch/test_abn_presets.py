"""The presets of InPlace-ABN's tables, compared with its tables and text.

Rota Bulò, Porzi, Kontschieder, "In-place activated BatchNorm for memory-optimized training of DNNs", CVPR 2018, arXiv 1712.02616.
"""

from __future__ import annotations

from functools import cache

import pytest

from launch.config.compose import compose_overrides
from launch.config.presets import purposes
from launch.config.schema import Config
from launch.run.build import learning_rate

NAMES = [name.removeprefix("inplace_abn/") for name in purposes("experiment") if name.startswith("inplace_abn/")]
SEGMENTATION = {"cityscapes": (19, 2.5e-3, 360), "cocostuff": (91, 2.5e-3, 30), "vistas": (65, 3.5e-3, 90)}
"""Classes, initial learning rate and epochs (section 4.2)."""


IMAGENET = {
    ("resnext101", "batchnorm", "relu", 256),
    ("resnext101", "batchnorm", "leaky_relu", 256),
    ("resnext101", "inplace_abn", "leaky_relu", 512),
    ("resnext152", "inplace_abn", "leaky_relu", 256),
    ("wide_resnet38", "inplace_abn", "leaky_relu", 256),
    ("resnext101", "inplace_abn_sync", "leaky_relu", 256),
}
"""Network, normalisation, activation in training and batch size of each row of Tables 1 and 2 (section 4.1)."""

COLUMNS = [(data, body) for body in ("resnext101", "wide_resnet38") for data in ("cityscapes", "cocostuff")]
CELLS = [
    ("batchnorm", (16, 512), (16, 480), (20, 512), (20, 496)),
    ("inplace_abn", (28, 512), (24, 480), (28, 512), (28, 496)),
    ("inplace_abn", (16, 672), (16, 600), (20, 640), (20, 576)),
    ("inplace_abn_sync", (16, 672), (16, 600), (20, 640), (20, 576)),
]
"""Normalisation, and crops per batch with their side in pixels, of each row of Table 3 (section 4.2)."""

TABLE4 = {
    ("cityscapes", "resnext152", "inplace_abn_sync", 12, 680, "shuffle"),
    ("cityscapes", "wide_resnet38", "inplace_abn", 16, 712, "shuffle"),
    ("cityscapes", "wide_resnet38", "inplace_abn_sync", 16, 712, "shuffle"),
    ("cityscapes", "wide_resnet38", "inplace_abn_sync", 12, 872, "shuffle"),
    ("cityscapes", "wide_resnet38", "inplace_abn_sync", 12, 872, "class_uniform"),
    ("vistas", "wide_resnet38", "inplace_abn_sync", 12, 776, "class_uniform"),
}
"""InPlace-ABN, Table 4 (section 4.2)."""


@cache
def compose(name: str) -> Config:
    return compose_overrides([f"experiment=inplace_abn/{name}"])


def row(config: Config) -> tuple[object, ...]:
    """Return what distinguishes the rows of Tables 3 and 4."""
    model, data = config.model.options, config.data
    return (data.name, model["body"], model["norm"], data.batch_size, data.size, data.options["sampling"])


def test_every_row_of_the_tables_has_a_preset() -> None:
    table3 = {(*column, norm, *crops, "shuffle") for norm, *cells in CELLS for column, crops in zip(COLUMNS, cells, strict=True)}
    found, classified = set(), set()
    for name in NAMES:
        config = compose(name)
        if name.startswith("imagenet"):
            classified.add(
                (config.model.name, config.model.options["norm"], config.model.options["activation"], config.data.batch_size)
            )
        else:
            found.add(row(config))
    assert found == table3 | TABLE4
    assert classified == IMAGENET


@pytest.mark.parametrize("name", NAMES)
def test_recipes(name: str) -> None:
    config = compose(name)
    assert (config.dp, config.k, config.method.name) == (4, 1, "backprop")
    assert (config.optim.options["weight_decay"], config.optim.options["momentum"]) == (1e-4, 0.9)
    rate = learning_rate(config, microbatches_per_epoch=10)
    epochs = config.trainer.epochs
    if config.data.name == "imagenet":
        assert (config.optim.options["nesterov"], epochs) == (True, 90)
        if config.model.name == "wide_resnet38":
            assert [rate(t + 1) for t in (0, 450, 900)] == pytest.approx([0.1, (0.1 + 1e-6) / 2, 1e-6])
        else:
            assert config.model.options["cardinality"] == 64
            assert [rate(10 * epoch) for epoch in (1, 30, 31, 60, 61, 90)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3])
        return
    classes, peak, length = SEGMENTATION[config.data.name]
    assert (config.data.classes, config.trainer.bootstrap, epochs) == (classes, 0.25, length)
    expected = [peak * (1 - tenth / 10) ** 0.9 for tenth in range(10)]
    assert [rate(length * tenth + 1) for tenth in range(10)] == pytest.approx(expected)
