"""The presets of InPlace-ABN's tables, compared with its tables and text.

Rota Bulò, Porzi, Kontschieder, "In-place activated BatchNorm for memory-optimized training of DNNs", CVPR 2018, arXiv 1712.02616.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from launch.config.compose import compose_overrides
from launch.config.presets import purposes
from launch.config.schema import Config
from launch.run.recipe import learning_rate, optimizer

NAMES = [name.removeprefix("inplace_abn/") for name in purposes("experiment") if name.startswith("inplace_abn/")]
NORMS = {"batchnorm": "batchnorm", "inplace_abn": "inplace_abn", "synchronised": "inplace_abn_sync"}
SEGMENTATION = {"cityscapes": (19, 2.5e-3, 360), "cocostuff": (91, 2.5e-3, 30), "vistas": (65, 3.5e-3, 90)}
"""Classes, initial learning rate and epochs (section 4.2)."""


INPLACE_ABN_TABLE1 = {
    ("relu", "relu"): (77.74, 93.86, 79.21, 94.67, 79.17, 94.67),
    ("relu", "leaky_relu"): (76.88, 93.42, 78.74, 94.46, 78.37, 94.25),
    ("leaky_relu", "leaky_relu"): (77.04, 93.50, 78.72, 94.47, 77.92, 94.28),
    ("leaky_relu", "relu"): (76.81, 93.53, 78.46, 94.38, 77.84, 94.20),
}
"""InPlace-ABN, Table 1 (section 4.1): ImageNet accuracy of ResNeXt-101 by activation in training and in validation: top-1 and top-5
of the 224² centre crop, ten 224² crops and the 320² centre crop."""

INPLACE_ABN_TABLE2 = {
    ("resnext101", "batchnorm", 256): (77.04, 93.50, 78.72, 94.47, 77.92, 94.28),
    ("resnext101", "inplace_abn", 512): (78.08, 93.79, 79.52, 94.66, 79.38, 94.67),
    ("resnext152", "inplace_abn", 256): (78.28, 94.04, 79.73, 94.82, 79.56, 94.67),
    ("wide_resnet38", "inplace_abn", 256): (79.72, 94.78, 81.03, 95.43, 80.69, 95.27),
    ("resnext101", "inplace_abn, synchronised", 256): (77.70, 93.78, 79.18, 94.60, 78.98, 94.56),
}
"""InPlace-ABN, Table 2 (section 4.1): ImageNet accuracy by network, normalisation and batch size. Columns as in Table 1."""

Crops = tuple[int, int, float]
"""Crops per batch, side of a crop in pixels, and mean intersection over union."""

INPLACE_ABN_TABLE3: Mapping[str, tuple[Crops, Crops, Crops, Crops]] = {
    "batchnorm": ((16, 512, 74.42), (16, 480, 20.30), (20, 512, 75.82), (20, 496, 22.44)),
    "inplace_abn, same crops": ((28, 512, 75.80), (24, 480, 22.63), (28, 512, 77.75), (28, 496, 22.96)),
    "inplace_abn, same batch": ((16, 672, 77.04), (16, 600, 23.35), (20, 640, 78.31), (20, 576, 24.10)),
    "inplace_abn, synchronised, same batch": ((16, 672, 77.58), (16, 600, 24.91), (20, 640, 78.06), (20, 576, 25.11)),
}
"""InPlace-ABN, Table 3 (section 4.2): ResNeXt-101 on Cityscapes and COCO-Stuff, WideResNet-38 on Cityscapes and COCO-Stuff."""

INPLACE_ABN_TABLE4: Mapping[str, Crops] = {
    "Cityscapes, ResNeXt-152, synchronised": (12, 680, 78.49),
    "Cityscapes, WideResNet-38": (16, 712, 78.45),
    "Cityscapes, WideResNet-38, synchronised, 16 crops": (16, 712, 79.02),
    "Cityscapes, WideResNet-38, synchronised, 12 crops": (12, 872, 79.16),
    "Cityscapes, WideResNet-38, synchronised, class-uniform sampling": (12, 872, 79.40),
    "Mapillary Vistas, WideResNet-38, synchronised, class-uniform sampling": (12, 776, 53.12),
}
"""InPlace-ABN, Table 4 (section 4.2)."""


def compose(name: str) -> Config:
    return compose_overrides([f"experiment=inplace_abn/{name}"])


def row(config: Config) -> tuple[object, ...]:
    """Return what distinguishes the rows of Tables 3 and 4."""
    return (config.data.name, config.model.body, config.model.norm, config.data.batch_size, config.data.size, config.data.sampling)


def table3() -> set[tuple[object, ...]]:
    columns = [(data, body) for body in ("resnext101", "wide_resnet38") for data in ("cityscapes", "cocostuff")]
    rows = set()
    for label, cells in INPLACE_ABN_TABLE3.items():
        norm = NORMS["synchronised" if "synchronised" in label else label.split(",")[0]]
        rows |= {(*column, norm, crops, side, "shuffle") for column, (crops, side, _) in zip(columns, cells, strict=True)}
    return rows


def table4() -> set[tuple[object, ...]]:
    rows = set()
    for label, (crops, side, _) in INPLACE_ABN_TABLE4.items():
        data = "vistas" if "Vistas" in label else "cityscapes"
        body = "resnext152" if "ResNeXt-152" in label else "wide_resnet38"
        norm = NORMS["synchronised" if "synchronised" in label else "inplace_abn"]
        rows.add((data, body, norm, crops, side, "class_uniform" if "class-uniform" in label else "shuffle"))
    return rows


def test_every_row_of_tables_3_and_4_has_a_preset() -> None:
    found = {row(compose(name)) for name in NAMES if not name.startswith("imagenet")}
    assert found == table3() | table4()


def test_every_row_of_tables_1_and_2_has_a_preset() -> None:
    found = set()
    for name in (name for name in NAMES if name.startswith("imagenet")):
        config = compose(name)
        found.add((config.model.name, config.model.norm, config.model.activation, config.data.batch_size))
    rows = {("resnext101", "batchnorm", training, 256) for training, _ in INPLACE_ABN_TABLE1}
    for model, norm, batch in INPLACE_ABN_TABLE2:
        rows.add((model, NORMS["synchronised" if "synchronised" in norm else norm], "leaky_relu", batch))
    assert found == rows


@pytest.mark.parametrize("name", NAMES)
def test_recipes(name: str) -> None:
    config = compose(name)
    assert (config.dp, config.k, config.method.name) == (4, 1, "backprop")
    assert (config.optim.weight_decay, config.optim.momentum) == (1e-4, 0.9)
    optimizer(config)
    rate = learning_rate(config, microbatches_per_epoch=10)
    epochs = config.trainer.epochs
    if config.data.name == "imagenet":
        assert (config.data.crop, config.data.jitter, config.optim.nesterov, epochs) == ("shorter_side", True, True, 90)
        if config.model.name == "wide_resnet38":
            assert [rate(t + 1) for t in (0, 450, 900)] == pytest.approx([0.1, (0.1 + 1e-6) / 2, 1e-6])
        else:
            assert config.model.cardinality == 64
            assert [rate(10 * epoch) for epoch in (1, 30, 31, 60, 61, 90)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3])
        return
    classes, peak, length = SEGMENTATION[config.data.name]
    assert (config.data.classes, config.trainer.bootstrap, epochs) == (classes, 0.25, length)
    expected = [peak * (1 - tenth / 10) ** 0.9 for tenth in range(10)]
    assert [rate(length * tenth + 1) for tenth in range(10)] == pytest.approx(expected)
