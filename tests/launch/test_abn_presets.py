"""The presets of InPlace-ABN's tables, compared with the tables in launch.reproduce.paper and the text of the paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.config.compose import compose_overrides
from launch.config.schema import Config
from launch.reproduce import paper
from launch.run.recipe import learning_rate, optimizer

FOLDER = Path(__file__).parents[2] / "conf" / "experiment" / "inplace_abn"
NAMES = [path.stem for path in sorted(FOLDER.iterdir())]
NORMS = {"batchnorm": "batchnorm", "inplace_abn": "inplace_abn", "synchronised": "inplace_abn_sync"}
SEGMENTATION = {"cityscapes": (19, 2.5e-3, 360), "cocostuff": (91, 2.5e-3, 30), "vistas": (65, 3.5e-3, 90)}
"""Classes, initial learning rate and epochs (section 4.2)."""


def compose(name: str) -> Config:
    return compose_overrides([f"experiment=inplace_abn/{name}"])


def row(config: Config) -> tuple[object, ...]:
    """Return what distinguishes the rows of Tables 3 and 4."""
    return (config.data.name, config.model.body, config.model.norm, config.data.batch_size, config.data.size, config.data.sampling)


def table3() -> set[tuple[object, ...]]:
    columns = [(data, body) for body in ("resnext101", "wide_resnet38") for data in ("cityscapes", "cocostuff")]
    rows = set()
    for label, cells in paper.INPLACE_ABN_TABLE3.items():
        norm = NORMS["synchronised" if "synchronised" in label else label.split(",")[0]]
        rows |= {(*column, norm, crops, side, "shuffle") for column, (crops, side, _) in zip(columns, cells, strict=True)}
    return rows


def table4() -> set[tuple[object, ...]]:
    rows = set()
    for label, (crops, side, _) in paper.INPLACE_ABN_TABLE4.items():
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
    rows = {("resnext101", "batchnorm", training, 256) for training, _ in paper.INPLACE_ABN_TABLE1}
    for model, norm, batch in paper.INPLACE_ABN_TABLE2:
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
