"""What the presets set, compared with the recipes and tables of the papers and the figures in reproduction.paper."""

from functools import cache
from typing import NamedTuple

import pytest

from launch.config.catalogue import configurations
from launch.config.compose import compose_overrides
from launch.config.schema import Config
from launch.run.build import learning_rate
from reproduction import paper
from reproduction.paper import PETRA_ACCUMULATIONS
from tests.support.pairs import all_pairs


class Recipe(NamedTuple):
    """A training recipe; the learning rate is multiplied by 0.1 at ``drops``, which are in ``unit`` as is ``length``."""

    batch: int
    peak: float
    warmup: int
    drops: tuple[int, ...]
    length: int
    weight_decay: float
    nesterov: bool
    unit: str = "epochs"
    momentum: float = 0.9


RECIPES = {
    "petra/cifar10": Recipe(128, 0.1, 5, (150, 225), 300, 5e-4, nesterov=True),
    "petra/imagenet32": Recipe(128, 0.1, 5, (30, 60, 80), 90, 1e-4, nesterov=True),
    "petra/imagenet": Recipe(256, 0.1, 5, (30, 60, 80), 90, 1e-4, nesterov=True),
    "revnet/cifar10": Recipe(100, 0.1, 0, (40_000, 60_000), 80_000, 2e-4, nesterov=False, unit="updates"),
    "revnet/imagenet": Recipe(256, 0.1, 0, (160_000, 320_000, 480_000), 600_000, 1e-4, nesterov=False, unit="updates"),
}
"""PETRA, section 4.1, and RevNet, appendix 7.1, by name of the preset. PETRA's text prints "128 on ImageNet32 and CIFAR-10, and 256
on ImageNet32"; the last one can only be ImageNet. RevNet's text has no initial learning rate for ImageNet; 0.1 is that of its
CIFAR recipe."""

PETRA_BATCH = 64
"""Images per microbatch of PETRA's runs; the peak rate is 0.1 · 64 k / 256 (PETRA, section 4.1)."""

BASELINES = [f"petra/{data}" for data in paper.DATASETS]
IMAGES = {"cifar10": 50_000, "imagenet32": 1_281_167, "imagenet": 1_281_167}


@cache
def compose(*overrides: str) -> Config:
    return compose_overrides([*overrides])


def images_of(preset: str) -> int:
    return IMAGES[preset.split("/")[1].removesuffix("_backprop").removesuffix("_resnet")]


def assert_optimizer(config: Config, recipe: Recipe) -> None:
    optim = config.optim
    expected = {"momentum": recipe.momentum, "nesterov": recipe.nesterov, "weight_decay": recipe.weight_decay}
    assert (optim.name, optim.options) == ("sgd", expected)
    assert config.schedule.options["gamma"] == 0.1


PETRAS = all_pairs(BASELINES, (PETRA_ACCUMULATIONS[0], PETRA_ACCUMULATIONS[-1]))


@pytest.mark.parametrize(("preset", "k"), [*PETRAS, *((preset, None) for preset in BASELINES)])
def test_petras_recipe_and_its_baselines_which_make_one_microbatch_of_a_batch(preset: str, k: int | None) -> None:
    recipe = RECIPES[preset]
    if k is None:
        config, peak = compose(f"experiment={preset}_backprop", "model=resnet18"), recipe.peak
        assert (config.method.name, config.k, config.data.batch_size) == ("backprop", 1, recipe.batch)
        assert compose(f"experiment={preset}_backprop", "model=revnet18", "method=reversible").k == 1
    else:
        config, peak = compose(f"experiment={preset}", "method=petra", f"k={k}"), 0.1 * 64 * k / 256
        assert config.data.batch_size == PETRA_BATCH == 64
    assert config.trainer.epochs == recipe.length
    assert_optimizer(config, recipe)
    microbatches = images_of(preset) // config.data.batch_size
    schedule = learning_rate(config, microbatches)
    for epoch in range(1, recipe.length + 1):  # the rate at its end, from the printed numbers
        rate = peak * min(1.0, epoch / recipe.warmup) * 0.1 ** sum(epoch > drop for drop in recipe.drops)
        assert schedule(epoch * microbatches) == pytest.approx(rate), epoch
    assert schedule(1) == pytest.approx(peak / (recipe.warmup * microbatches))
    for drop in recipe.drops:
        assert schedule(drop * microbatches + 1) == pytest.approx(0.1 * schedule(drop * microbatches))


@pytest.mark.parametrize(("preset", "microbatch"), [("cifar10", 100), ("imagenet", 64), ("imagenet_resnet", 32)])
def test_revnets_recipes(preset: str, microbatch: int) -> None:
    recipe = RECIPES[f"revnet/{preset.removesuffix('_resnet')}"]
    config = compose(f"experiment=revnet/{preset}", "model=revnet38")
    assert (config.data.batch_size, config.data.batch_size * config.k) == (microbatch, recipe.batch)
    assert_optimizer(config, recipe)
    microbatches = images_of(f"revnet/{preset}") // microbatch
    schedule = learning_rate(config, microbatches)
    updates = microbatches / config.k
    # An epoch of ImageNet has 5004.5 updates, so the drops are at whole epochs next to the printed numbers of updates.
    assert config.trainer.epochs * updates == pytest.approx(recipe.length, rel=1e-3)
    assert [m * updates for m in config.schedule.options["milestones"]] == pytest.approx(recipe.drops, rel=1e-3)
    for epoch in range(1, config.trainer.epochs + 1):
        drops = sum(epoch > milestone for milestone in config.schedule.options["milestones"])
        assert schedule(epoch * microbatches) == pytest.approx(recipe.peak * 0.1**drops)
    assert preset != "cifar10" or config.data.options["mean_image"]


NAMES = [name.removeprefix("inplace_abn/") for name in configurations("experiment") if name.startswith("inplace_abn/")]
SEGMENTATION = {"cityscapes": (19, 2.5e-3, 360), "cocostuff": (91, 2.5e-3, 30), "vistas": (65, 3.5e-3, 90)}
"""Classes, initial learning rate and epochs (section 4.2)."""


@pytest.mark.parametrize("name", NAMES)
def test_recipes(name: str) -> None:
    config = compose(f"experiment=inplace_abn/{name}")
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
