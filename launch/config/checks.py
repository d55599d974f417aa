"""What each key of a configuration accepts, and which keys exclude each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import reduce
from typing import Any, NamedTuple

from launch.config.schema import Config
from launch.run.recipe import PRECISIONS, SCALINGS, SCOPES
from launch.runtime.rank import Place
from petra.errors import require
from petra.method import Keep, Weights
from petra.models import MODELS
from petra.plan.layout import processes_per_replica
from petra.staleness import Prediction
from petra.training import FORMATS, OPTIMIZERS, SCHEDULES, TensorBoardLogger, WandbLogger
from petra.training.export import require as require_format

AUTO = "auto"
LONGEST_TIMEOUT = 10**7
"""Seconds; torch refuses much longer ones."""
MOST_THREADS = 1000
WIRES = ("float32", "bf16")


class Rule(NamedTuple):
    """What a key accepts: a predicate, and the same in words."""

    accepts: Callable[[Any], bool]
    expected: str


def _at_least(least: int) -> Rule:
    return Rule(lambda value: value >= least, f"an integer >= {least}")


def _between(least: int, most: int) -> Rule:
    return Rule(lambda value: least <= value <= most, f"an integer from {least} to {most}")


def _one_of(values: Collection[str]) -> Rule:
    return Rule(lambda value: value in values, f"one of {', '.join(values)}")


def _or_null(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.accepts(value), f"null or {rule.expected}")


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_integers(value: Any) -> bool:
    """Return whether a value is a list of integers."""
    return isinstance(value, list) and all(is_integer(v) for v in value)


_DELAY = Rule(
    lambda value: value == AUTO or is_integer(value) or is_integers(value),
    "an integer >= 0, a list with one per boundary, or auto",
)
_KEEP = Rule(
    lambda value: all(keep in tuple(Keep) for keep in value) if isinstance(value, list) else value in (*Keep, AUTO),
    f"one of {', '.join(Keep)}, a list with one per block, or auto",
)
_STAGES = Rule(
    lambda value: value in (None, AUTO) or is_integer(value) or bool(value and is_integers(value)),
    "null, an integer, a list with the number of blocks in each stage, or auto",
)

RULES: dict[str, Rule] = {
    "k": _at_least(1),
    "seed": _at_least(0),
    "model.name": _one_of(MODELS),
    "method.delay": _DELAY,
    "method.keep": _KEEP,
    "method.weights": _one_of(tuple(Weights)),
    "remedy.discount": Rule(lambda value: 0 <= value < math.inf, "a number >= 0"),
    "remedy.prediction": _one_of(tuple(Prediction)),
    "optim.name": _one_of(OPTIMIZERS),
    "optim.scaling": _one_of(SCALINGS),
    "optim.clip_scope": _one_of(SCOPES),
    "schedule.name": _one_of(SCHEDULES),
    "trainer.epochs": _at_least(1),
    "trainer.stages": _STAGES,
    "trainer.precision": _one_of(PRECISIONS),
    "trainer.wire": _one_of(WIRES),
    "trainer.limit_batches": _or_null(_at_least(1)),
    "trainer.threads": _between(1, MOST_THREADS),
    "trainer.concurrency": _between(1, MOST_THREADS),
    "trainer.timeout": Rule(lambda value: 0 < value <= LONGEST_TIMEOUT, f"a number > 0, at most {LONGEST_TIMEOUT}"),
    "trainer.drift": _or_null(Rule(lambda value: value > 0, "a number > 0")),
    "trainer.trace": _or_null(_at_least(1)),
    "trainer.diagnose": _or_null(_at_least(1)),
    "trainer.export": _one_of(("none", *FORMATS)),
    "trainer.compile": _or_null(_one_of(("eager", "aot_eager", "inductor"))),
    "checkpoint.every": _or_null(_at_least(1)),
    "checkpoint.keep": _at_least(0),
    "logger.name": _one_of(("jsonl", "wandb", "tensorboard")),
    "logger.mode": _one_of(("offline", "online")),
}
"""By key. Types are the schema's; what only a builder knows (data set, optimizer, schedule) is checked there."""


def check(config: Config, place: Place) -> None:
    """Check every key on its own, then the keys that exclude each other.

    Raises:
        ConfigError: If a value is not accepted. The message names the key.
    """
    for key, rule in RULES.items():
        value = reduce(getattr, key.split("."), config)
        require(rule.accepts(value), key, rule.expected, value)
    _check_start(config)
    _check_installed(config)
    _check_processes(config, place)
    _check_auto(config)
    trainer = config.trainer
    exact = not trainer.exact_streams or trainer.wire == "float32"
    require(exact, "trainer.exact_streams", f"false with trainer.wire={trainer.wire}", "true")


def _check_start(config: Config) -> None:
    located = config.resume != AUTO or config.run_dir is not None
    require(located, "resume", "auto only with run_dir=<the run's folder>", AUTO)
    single = config.init_from is None or config.resume in (None, AUTO)
    require(single, "init_from", "null with resume=<folder>, which brings its own weights", config.init_from)


def _check_installed(config: Config) -> None:
    if config.logger.name == "wandb":
        WandbLogger.require()
    if config.logger.name == "tensorboard":
        TensorBoardLogger.require()
    if config.trainer.export != "none":
        require_format(FORMATS[config.trainer.export])


def _check_processes(config: Config, place: Place) -> None:
    """Check what depends on the number of processes."""
    trainer = config.trainer
    transports = ("auto", "local") if processes_per_replica(place.world, config.dp) == 1 else ("auto", "lockstep", "edge")
    require(trainer.transport in transports, "trainer.transport", f"one of {', '.join(transports)}", trainer.transport)
    alone = place.world == 1
    cpu = alone and place.device(trainer.device).type == "cpu"
    require(trainer.concurrency == 1 or cpu, "trainer.concurrency", "1, except for one process on the CPU", trainer.concurrency)
    found = f"{trainer.diagnose} in {place.world} processes"
    require(trainer.diagnose is None or alone, "trainer.diagnose", "null, or one process", found)


def _check_auto(config: Config) -> None:
    """Check what depends on settings that are chosen automatically."""
    memory, chosen = config.trainer.memory_limit, AUTO in (config.trainer.stages, config.method.keep)
    fits = memory is None or (memory > 0 and chosen)
    require(fits, "trainer.memory_limit", "null, or a number > 0 with trainer.stages=auto or method.keep=auto", memory)
    fits = not (config.method.fill and config.method.delay == AUTO)
    require(fits, "method.delay", "an integer >= 0 with method.fill=true", AUTO)
