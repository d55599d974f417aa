"""What staleness cost in petra's benchmarks, for ``petra plan`` and ``petra train``: how far runs ended above exact gradients.

``expected.csv`` has a row for each setting that was trained with several seeds. ``python -m benchmarks.expected`` makes it from
the records. Between the measured staleness of the same setting, values are on a line; beyond, nothing is known.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from petra.method import Keep, Method, Weights

from .build import Setup

PAGE = "docs/what_to_set.md"
REMEDIES = {
    "none": "none",
    "feedback=1.0": "feedback",
    "prediction=velocity": "prediction",
    "prediction=difference": "prediction_difference",
}
"""Presets of the group ``remedy`` by the name of a configuration's remedy."""
FILTERS = " optim.filters=true"
"""What the optimizer of images has besides its name if it is Muon for filters, as on a command line."""

LOSSLESS = {None, "bf16", "int8", "int8_token", "float8_token"}
"""Formats of messages that cost no loss in a benchmark (docs/evidence/links.md)."""


@dataclass(frozen=True)
class Task:
    """What the runs of a benchmark trained, and which other runs its numbers may be taken for.

    Attributes:
        name: Name in ``expected.csv``.
        unit: Unit of losses above exact gradients.
        noticeable: Loss above which ``petra train`` says so.
        what: The runs, in words.
        parameters, samples: Smallest and largest number of parameters of the network, and of targets that a run trains on.
    """

    name: str
    unit: str
    noticeable: float
    what: str
    parameters: tuple[float, float]
    samples: tuple[float, float]


TASKS = {
    task.name: task
    for task in (
        Task("text", "%", 2.0, "text, 0.7 million parameters, 0.5 million tokens", (0.36e6, 2.6e6), (0.26e6, 1.05e6)),
        Task("images", "points", 1.0, "CIFAR-10, 0.7 million parameters, 20 epochs", (0.35e6, 1.4e6), (0.45e6, 1.8e6)),
        Task("fine-tuning", "%", 2.0, "fine-tuning of 135 million parameters on 82,000 tokens", (67e6, 270e6), (41e3, 164e3)),
    )
}
"""Benchmarks by name. Ranges are those that were trained, widened by a factor of two where only one size was."""


@dataclass(frozen=True)
class Expected:
    """Loss above exact gradients.

    Attributes:
        above: In the unit of the task.
        half: Half the width of its 95 % interval.
        loss: Loss itself, in bits per byte, percent of wrong answers, or nats per token. Less is better.
        updates: Updates until the training loss that all settings of the task reach; 0 if it is not known.
    """

    above: float
    half: float
    loss: float
    updates: float


@dataclass(frozen=True)
class Setting:
    """What decides how much staleness costs. See :class:`petra.Method`, ``optim`` and ``remedy`` of a configuration.

    ``optimizer`` is the name of a preset, and :data:`FILTERS` if Muon updates the filters of a network for images.
    """

    task: str
    keep: Keep
    weights: Weights
    optimizer: str
    remedy: str


@cache
def measured() -> Mapping[Setting, Mapping[float, Expected]]:
    """Return what was measured, by staleness of the first stage in updates. Each setting has exact gradients at 0."""
    found: dict[Setting, dict[float, Expected]] = defaultdict(dict)
    exact: dict[tuple[str, str], Expected] = {}
    with (Path(__file__).parent / "expected.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            values = Expected(*(float(row[name] or 0) for name in ("above", "half", "loss", "updates")))
            if not row["keep"]:
                exact[row["task"], row["optimizer"]] = values
                continue
            setting = Setting(row["task"], Keep(row["keep"]), Weights(row["weights"]), row["optimizer"], row["remedy"])
            found[setting][float(row["staleness"])] = values
    return {
        setting: {0.0: exact[setting.task, setting.optimizer], **dict(sorted(curve.items()))} for setting, curve in found.items()
    }


def setting_of(setup: Setup, method: Method, keeps: Iterable[Keep] = ()) -> Setting | None:
    """Return the setting of a run with a method; None for what no benchmark trains, such as blocks that store different things.

    Args:
        keeps: What each block stores, if it was chosen for each.
    """
    config, tuned = setup.config, setup.config.model.name == "huggingface"
    trainer = config.trainer
    formats = {trainer.message_format, trainer.gradient_format}
    other = any(config.model.options.get(name) for name in ("stream", "lora"))
    if setup.outer.every or other or formats - LOSSLESS or trainer.stored_format:
        return None
    stored = {*keeps} or {*(method.keep if isinstance(method.keep, tuple) else (method.keep,))}
    task = {"tokens": "fine-tuning" if tuned else "text", "images": "images"}.get(setup.unit)
    if task is None or len(stored) != 1:
        return None
    (own,) = stored
    reversible = any(profile.reversible for profile in setup.plan.layout.profiles)  # other blocks store their input
    keep = Keep.INPUT if own is Keep.NOTHING and not reversible else own
    filters = FILTERS if task == "images" and config.optim.options.get("filters") else ""
    return Setting(task, keep, method.weights, config.optim.name.lower() + filters, config.remedy.name)


def expected(setting: Setting | None, staleness: float) -> Expected | None:
    """Return the loss above exact gradients at a staleness of the first stage, or None beyond what was measured."""
    if setting is None:
        return None
    curve = measured().get(setting, {})
    if staleness == 0:
        found = [
            each[0.0] for known, each in measured().items() if (known.task, known.optimizer) == (setting.task, setting.optimizer)
        ]
        return found[0] if found else Expected(0, 0, 0, 0)
    for (low, below), (high, over) in pairwise(curve.items()):
        if low < staleness <= high:
            share = (staleness - low) / (high - low)
            return Expected(*(a + share * (b - a) for a, b in zip(vars(below).values(), vars(over).values(), strict=True)))
    return None


def in_range(bounds: tuple[float, float], size: float | None) -> bool:
    """Return whether a size lies between those of a benchmark; no if it is not known."""
    return size is not None and bounds[0] <= size <= bounds[1]


def shown(found: Expected, task: str) -> str:
    """Return a loss above exact gradients as text."""
    return f"{found.above:.2g} ± {found.half:.1g} {TASKS[task].unit}" if found.above or found.half else "0"


def note(setup: Setup) -> list[str]:
    """Return a line for a run whose setting ended noticeably above exact gradients in the benchmark, with one that loses less.

    Beyond the largest staleness that was measured, the loss there is quoted.
    """
    setting, staleness = setting_of(setup, setup.plan.method), setup.plan.stages[0].staleness
    if setting is None or setting not in measured() or staleness == 0:
        return []
    task, largest = TASKS[setting.task], max(measured()[setting])
    at = min(staleness, largest)
    own = expected(setting, at)
    if own is None or own.above <= task.noticeable:
        return []
    remedy = "" if setting.remedy == "none" else f" and {setting.remedy}"
    most = ", the most that was measured," if staleness > largest else ""
    return [
        f"note: staleness of {staleness:.3g} updates with {setting.optimizer}{remedy}. In the benchmark ({task.what}), "
        f"{at:.3g} updates{most} ended {shown(own, setting.task)} above exact gradients"
        f"{_better(setup, setting, staleness, own)} ({PAGE})"
    ]


def _better(setup: Setup, setting: Setting, staleness: float, own: Expected) -> str:
    """Return the keys of the best setting, of those with the largest staleness at which one loses at most half as much."""
    halving: list[list[str]] = [[]]
    if setting.weights is not Weights.DOUBLE:  # whose staleness is always 1
        halving += [words for words in (_halved(setup, 2), _halved(setup, 4)) if words]
    for share, fresher in enumerate(halving):
        options = []
        for other in measured():
            if (other.task, other.keep, other.weights) == (setting.task, setting.keep, setting.weights):
                found = expected(other, min(staleness / 2**share, max(measured()[setting])))
                possible = other.remedy == "none" or not setup.config.optim.rules.shard
                if possible and found is not None and found.above <= own.above / 2 and found.loss < own.loss:
                    options.append((found.loss, f"; {' '.join([*_words(other, setting), *fresher])}: {shown(found, setting.task)}"))
        if options:
            return min(options)[1]
    return ""


def _halved(setup: Setup, divisor: int) -> list[str]:
    """Return keys with which staleness is a fraction, and updates have as many samples; none if microbatches can't be so small."""
    config, words = setup.config, list[str]()
    if setup.plan.method.delay == 2:
        words, divisor = ["method.delay=1"], divisor // 2
    if config.data.batch_size % (divisor * config.dp):
        return []
    return words if divisor == 1 else [*words, f"k={divisor * config.k}", f"data.batch_size={config.data.batch_size // divisor}"]


def _words(other: Setting, setting: Setting) -> list[str]:
    return [
        *([f"optim={other.optimizer}"] if other.optimizer != setting.optimizer else []),
        *([f"remedy={REMEDIES[other.remedy]}"] if other.remedy != setting.remedy else []),
    ]
