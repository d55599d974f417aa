"""From a configuration to the objects that it describes; what can't work is refused here, before any process waits for another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch

from launch.config.options import options
from launch.config.schema import AUTO, PRECISIONS, WIRES, Config
from launch.run import recipe
from launch.run.data import checked_form, data_sources
from launch.runtime.rank import Process
from petra.data import EvalStream, TrainStream
from petra.errors import ConfigError
from petra.method import Keep, Method, Weights
from petra.model import Model
from petra.models import MODELS
from petra.pipeline import Pipeline
from petra.plan.layout import Layout, line_length
from petra.settings import Numerics, Runtime, TransportName
from petra.specs import TensorSpec
from petra.staleness.remedies import Prediction, Remedy
from petra.training import FORMATS, Schedule, TensorBoardLogger, WandbLogger
from petra.training.export import require

SMALL = 64
"""Pixels up to which ``model.stem=auto`` keeps an image's resolution."""


@dataclass(frozen=True)
class Plan:
    """A configuration that has been checked as far as that goes without data and without other processes."""

    config: Config
    model: Model
    method: Method
    inputs: TensorSpec
    """Of a whole microbatch; ``layout`` has a replica's."""
    layout: Layout
    stages: int | list[int] | None
    device: torch.device
    autocast: torch.dtype | None
    wire: torch.dtype | None
    auto: frozenset[str] = frozenset()
    """What of stages, delay and keep is still to be chosen from measurements; until then the values stand for them."""

    @property
    def unit(self) -> str:
        """What a target belongs to."""
        return "images" if self.inputs.dtype.is_floating_point else "tokens"

    def data(self) -> tuple[TrainStream, EvalStream]:
        """This process's part of the data, a call of all processes together.

        Raises:
            PetraError: the data set can't be used, in every process.
        """
        return data_sources(self.config.data, self.config.seed, self.layout)

    def learning_rate(self, microbatches_per_epoch: int) -> Schedule:
        """The rate of every stage, for updates of batch_size · k samples."""
        return recipe.learning_rate(self.config, microbatches_per_epoch)

    def remedy(self, microbatches_per_epoch: int) -> Remedy:
        """What is done about stale gradients."""
        remedy = self.config.remedy
        return Remedy(
            discount=round(remedy.discount * microbatches_per_epoch),
            correction=remedy.correction,
            prediction=Prediction(remedy.prediction),
            horizon=remedy.horizon,
            compensation=remedy.compensation,
            shrink=remedy.shrink,
            lookahead=remedy.lookahead,
        )

    def pipeline(self, learning_rate: Schedule) -> Pipeline:
        """This process's part of the pipeline."""
        trainer = self.config.trainer
        return Pipeline(
            self.model,
            self.inputs,
            dp=self.config.dp,
            method=self.method,
            remedy=self.remedy(learning_rate.microbatches_per_epoch),
            k=self.config.k,
            stages=self.stages,
            optimizer=recipe.optimizer(self.config),
            learning_rate=learning_rate,
            rules=recipe.rules(self.config),
            loss=recipe.losses(self.config),
            metrics=recipe.metrics(self.config.data.classes, self.unit),
            seed=self.config.seed,
            numerics=Numerics(self.autocast, trainer.channels_last, trainer.exact_streams, self.wire),
            runtime=Runtime(self.device, cast(TransportName, trainer.transport), trainer.concurrency, trainer.compile),
        )


def plan(config: Config, place: Process) -> Plan:
    """Checks a configuration for the processes at hand.

    Raises:
        ConfigError, ModelError: the text names the key, what was found and what is accepted.
    """
    trainer = config.trainer
    line = line_length(place.world, config.dp)
    recipe.optimizer(config), recipe.rules(config), recipe.losses(config)
    _choice("trainer.transport", trainer.transport, ("auto", "local") if line == 1 else ("auto", "lockstep", "edge"))
    place_known = config.resume != AUTO or config.run_dir is not None
    _require(place_known, "resume", AUTO, "auto with run_dir=<the run's folder>")
    once = config.init_from is None or config.resume in (None, AUTO)
    _require(once, "init_from", config.init_from, "null with resume=<folder>, which brings its own weights")
    if config.logger.name == "wandb":
        WandbLogger.require()
    if config.logger.name == "tensorboard":
        TensorBoardLogger.require()
    if trainer.export != "none":
        require(FORMATS[trainer.export])
    inputs = checked_form(config.data)
    model = _model(config)
    stages = line if trainer.stages == AUTO else trainer.stages
    settings = {"stages": trainer.stages, "delay": config.method.delay, "keep": config.method.keep}
    result = Plan(
        config=config,
        model=model,
        method=_method(config),
        inputs=inputs,
        layout=Layout.plan(model, inputs, stages, place.world, config.dp),
        stages=stages,
        device=place.device(trainer.device),
        autocast=PRECISIONS[trainer.precision],
        wire=WIRES[trainer.wire],
        auto=frozenset(name for name, found in settings.items() if found == AUTO),
    )
    delays = result.method.delays(len(result.layout.stages), config.k)
    result.method.check(delays, config.k, casts=result.autocast is not None)
    recipe.rules(config).require_moment(result.method, delays)
    remedy = result.remedy(microbatches_per_epoch=1)
    remedy.check(result.method)
    remedy.require_optimizer(recipe.optimizer(config)(torch.nn.Linear(1, 1)))
    if trainer.exact_streams:
        result.layout.require_exact()
    _require(not (trainer.exact_streams and result.wire), "trainer.exact_streams", True, "false with trainer.wire=bf16")
    memory, tuned = trainer.memory_limit, result.auto & {"stages", "keep"}
    fits = memory is None or (memory > 0 and bool(tuned))
    _require(fits, "trainer.memory_limit", memory, "null, or numbers > 0 with stages or keep auto")
    _require(not (config.method.fill and "delay" in result.auto), "method.delay", AUTO, "integers >= 0 with method.fill=true")
    alone = trainer.concurrency == 1 or (place.world == 1 and result.device.type == "cpu")
    _require(alone, "trainer.concurrency", trainer.concurrency, "1 but for one process on the CPU")
    alone = trainer.diagnose is None or place.world == 1
    _require(alone, "trainer.diagnose", f"{trainer.diagnose} in {place.world} processes", "null, or one process")
    result.learning_rate(microbatches_per_epoch=1)
    return result


def _model(config: Config) -> Model:
    """The model, given the options that are set; those that its builder doesn't have are refused."""
    build = MODELS[config.model.name]
    given = options(config.model, "model", build)
    if given.get("stem") == "auto":
        given["stem"] = "imagenet" if config.data.size > SMALL else "cifar"
    size = {"size": config.data.size} if "size" in signature(build).parameters else {}
    return build(config.data.classes, **given, **size)


def _method(config: Config) -> Method:
    method = config.method
    return Method(
        method.name,
        delay=_delay(method.delay),
        keep=_keep(method.keep),
        weights=Weights(method.weights),
        flush=method.flush,
        fill=method.fill,
    )


def _keep(found: Any) -> Keep | tuple[Keep, ...]:
    if found == AUTO:
        return Keep.NOTHING
    return tuple(map(Keep, found)) if isinstance(found, list) else Keep(found)


def _delay(found: Any) -> int | tuple[int, ...]:
    if found == AUTO:
        return 2
    return tuple(found) if isinstance(found, list) else int(found)


def _choice(key: str, found: str, accepted: Iterable[str]) -> str:
    _require(found in accepted, key, found, ", ".join(accepted))
    return found


def _require(right: bool, key: str, found: Any, accepted: str) -> None:
    if not right:
        raise ConfigError(f"{key}: found {found}, accepted are {accepted}")
