"""From a configuration to the objects that it describes; what can't work is refused here, before any process waits for another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, cast

import torch

from launch.cluster import variables
from launch.config import Config
from launch.data import checked_form, streams
from launch.processes import Place
from petra.data import EvalStream, TrainStream
from petra.errors import ConfigError
from petra.method import Keep, Method, Weights
from petra.model import Model
from petra.models import MODELS
from petra.partition import Layout
from petra.pipeline import Pipeline, TransportName
from petra.remedies import Prediction, Remedy
from petra.streams import TensorSpec
from petra.training import Schedule, WandbLogger, peak_rate, sgd

SMALL = 64
"""Pixels up to which ``model.stem=auto`` keeps an image's resolution."""
AUTO = "auto"
PRECISIONS = {"float32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Plan:
    """A configuration that has been checked as far as that goes without data and without other processes."""

    config: Config
    model: Model
    method: Method
    inputs: TensorSpec
    layout: Layout
    stages: int | list[int] | None
    device: torch.device
    autocast: torch.dtype | None
    wire: torch.dtype | None
    auto: frozenset[str] = frozenset()
    """What of stages, delay and keep is still to be chosen from measurements; until then the values stand for them."""

    def data(self) -> tuple[TrainStream, EvalStream]:
        """This process's part of the data, a call of all processes together.

        Raises:
            PetraError: the data set can't be used, in every process.
        """
        return streams(self.config.data, self.config.seed, self.layout)

    def learning_rate(self, microbatches_per_epoch: int) -> Schedule:
        """The rate of every stage, for updates of batch_size · k images."""
        optim = self.config.optim
        peak = peak_rate(optim.lr, self.config.data.batch_size, self.config.k)
        return Schedule(peak, microbatches_per_epoch, optim.warmup_epochs, optim.milestones, optim.gamma)

    def remedy(self, microbatches_per_epoch: int) -> Remedy:
        """What is done about stale gradients."""
        remedy = self.config.remedy
        return Remedy(
            discount=round(remedy.discount * microbatches_per_epoch),
            correction=remedy.correction,
            prediction=Prediction(_choice("remedy.prediction", remedy.prediction, tuple(Prediction))),
            horizon=remedy.horizon,
            compensation=remedy.compensation,
            shrink=remedy.shrink,
            lookahead=remedy.lookahead,
        )

    def pipeline(self, learning_rate: Schedule) -> Pipeline:
        """This process's part of the pipeline."""
        optim, trainer = self.config.optim, self.config.trainer
        return Pipeline(
            self.model,
            self.inputs,
            method=self.method,
            remedy=self.remedy(learning_rate.microbatches_per_epoch),
            k=self.config.k,
            stages=self.stages,
            optimizer=partial(sgd, momentum=optim.momentum, nesterov=optim.nesterov, weight_decay=optim.weight_decay),
            learning_rate=learning_rate,
            seed=self.config.seed,
            autocast=self.autocast,
            channels_last=trainer.channels_last,
            exact_streams=trainer.exact_streams,
            wire=self.wire,
            device=self.device,
            transport=cast(TransportName, trainer.transport),
        )


def plan(config: Config, place: Place) -> Plan:
    """Checks a configuration for the processes at hand.

    Raises:
        ConfigError, ModelError: the text names the key, what was found and what is accepted.
    """
    trainer = config.trainer
    for key, found in (("k", config.k), ("trainer.epochs", trainer.epochs), ("trainer.threads", trainer.threads)):
        _require(found >= 1, key, found, "integers >= 1")
    _require(config.seed >= 0, "seed", config.seed, "integers >= 0")
    _require(config.optim.momentum >= 0, "optim.momentum", config.optim.momentum, "numbers >= 0")
    _require(not config.optim.nesterov or config.optim.momentum > 0, "optim.nesterov", True, "false where optim.momentum=0")
    _require(config.optim.weight_decay >= 0, "optim.weight_decay", config.optim.weight_decay, "numbers >= 0")
    _require(trainer.timeout > 0, "trainer.timeout", trainer.timeout, "numbers > 0")
    _choice("model.name", config.model.name, MODELS)
    _choice("optim.name", config.optim.name, ("sgd",))
    _choice("trainer.transport", trainer.transport, ("auto", "local", "lockstep", "edge"))
    _choice("trainer.precision", trainer.precision, PRECISIONS)
    _choice("trainer.wire", trainer.wire, PRECISIONS)
    variables(config.cluster)
    _choice("logger.name", config.logger.name, ("jsonl", "wandb"))
    _choice("logger.mode", config.logger.mode, ("offline", "online"))
    if config.logger.name == "wandb":
        WandbLogger.require()
    inputs = checked_form(config.data)
    model = _model(config)
    stages = place.world if trainer.stages == AUTO else _stages(trainer.stages)
    settings = {"stages": trainer.stages, "delay": config.method.delay, "keep": config.method.keep}
    result = Plan(
        config=config,
        model=model,
        method=_method(config),
        inputs=inputs,
        layout=Layout.plan(model, inputs, stages, place.world),
        stages=stages,
        device=place.device(trainer.device),
        autocast=PRECISIONS[trainer.precision],
        wire=PRECISIONS[trainer.wire],
        auto=frozenset(name for name, found in settings.items() if found == AUTO),
    )
    delays = result.method.delays(len(result.layout.stages), config.k)
    result.method.check(delays, config.k, casts=result.autocast is not None)
    result.remedy(microbatches_per_epoch=1).check(result.method)
    _require(not (trainer.exact_streams and result.wire), "trainer.exact_streams", True, "false with trainer.wire=bf16")
    limit, tuned = trainer.memory_limit, result.auto & {"stages", "keep"}
    _require(
        limit is None or (limit > 0 and bool(tuned)), "trainer.memory_limit", limit, "null, or numbers > 0 with stages or keep auto"
    )
    _require(not (config.method.fill and "delay" in result.auto), "method.delay", AUTO, "integers >= 0 with method.fill=true")
    for key, count in (("trainer.trace", trainer.trace), ("trainer.diagnose", trainer.diagnose)):
        _require(count is None or count >= 1, key, count, "null, or integers >= 1")
    alone = trainer.diagnose is None or place.world == 1
    _require(alone, "trainer.diagnose", f"{trainer.diagnose} in {place.world} processes", "null, or one process")
    result.learning_rate(microbatches_per_epoch=1)
    return result


def _model(config: Config) -> Model:
    """The model, given the options that are set; those that its builder doesn't have are refused."""
    build, options = MODELS[config.model.name], config.model.options()
    parameters = signature(build).parameters.keys()
    for key in options:
        if key not in parameters:
            accepted = ", ".join(name for name in parameters if name not in ("classes", "size"))
            raise ConfigError(f"model.{key}: {config.model.name} has no such setting, accepted are {accepted}")
    if options.get("stem") == "auto":
        options["stem"] = "imagenet" if config.data.size > SMALL else "cifar"
    size = {"size": config.data.size} if "size" in parameters else {}
    return build(config.data.classes, **options, **size)


def _method(config: Config) -> Method:
    method = config.method
    return Method(
        method.name,
        delay=tuple(method.delay) if _is_integers(method.delay) else _delay(method.delay),
        keep=_keep(method.keep),
        weights=Weights(_choice("method.weights", method.weights, tuple(Weights))),
        flush=method.flush,
        fill=method.fill,
    )


def _keep(found: Any) -> Keep | tuple[Keep, ...]:
    if found == AUTO:
        return Keep.NOTHING
    if isinstance(found, list):
        return tuple(Keep(_choice("method.keep", keep, tuple(Keep))) for keep in found)
    return Keep(_choice("method.keep", found, (*Keep, AUTO)))


def _delay(found: Any) -> int:
    if found == AUTO:
        return 2
    _require(_is_integer(found), "method.delay", found, "integers >= 0, one or one per boundary, or auto")
    return int(found)


def _stages(found: Any) -> int | list[int] | None:
    accepted = "null, an integer, auto, or a list with the number of blocks in each stage"
    _require(found is None or _is_integer(found) or bool(found and _is_integers(found)), "trainer.stages", found, accepted)
    return cast("int | list[int] | None", found)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_integers(value: Any) -> bool:
    return isinstance(value, list) and all(_is_integer(v) for v in value)


def _choice(key: str, found: str, accepted: Iterable[str]) -> str:
    _require(found in accepted, key, found, ", ".join(accepted))
    return found


def _require(right: bool, key: str, found: Any, accepted: str) -> None:
    if not right:
        raise ConfigError(f"{key}: found {found}, accepted are {accepted}")
