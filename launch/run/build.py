"""Setup of a run from its configuration. Invalid configurations are rejected before any rank waits for another."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, cast

import torch

from petra.cost_model.delays import largest_delay
from petra.data import EvalSource, TrainSource
from petra.engine.build import check_runtime
from petra.engine.metrics import size_of
from petra.engine.options.replicas import Replicas
from petra.engine.recipe import Recipe, Remedy
from petra.errors import ConfigError, alternatives, invalid, require
from petra.inplace_abn import PIXEL_DATASETS, PIXEL_MODELS
from petra.inplace_abn.deeplab import OUTPUT_STRIDE
from petra.method import Keep, Method, Weights
from petra.model import Model
from petra.models import MODELS, TOKEN_MODELS
from petra.pipeline import Pipeline
from petra.plan import Plan, make_plan
from petra.plan.layout import processes_per_replica
from petra.settings import Numerics, Runtime, TransportName
from petra.specs import TensorSpec
from petra.training import Schedule

from ..config.names import PRECISIONS, is_own
from ..config.options import options
from ..config.schema import AUTO, Config, DataConfig, TrainerConfig
from ..runtime.rank import Process
from . import recipe
from .checks import check
from .data import data_sources, describe_inputs
from .own import imported, register_own, require_arguments

LARGEST_CIFAR_STEM = 64
"""Largest image size in pixels for which ``model.stem=auto`` chooses the stem that keeps the resolution."""


@dataclass(frozen=True)
class Setup:
    """A checked configuration with the plan of its run.

    Attributes:
        config: The configuration.
        plan: Plan of the run.
        device: Device of this process.
        processes: Number of processes, of all replicas together.
        auto: Which of ``stages``, ``delay`` and ``keep`` auto-tuning must choose. The plan has provisional values for them.
    """

    config: Config
    plan: Plan
    device: torch.device
    processes: int
    auto: frozenset[str]

    @property
    def unit(self) -> str:
        """Unit in which targets are counted: ``images``, ``tokens`` or ``pixels``."""
        return _unit(self.config.data, self.plan.inputs)

    def with_choice(self, stages: list[int], method: Method) -> Setup:
        """Return the setup with the chosen values for all settings that were ``auto``."""
        plan = _plan(self.config, self.plan.model, method, stages, self.processes, self.device)
        return replace(self, plan=plan, auto=frozenset())

    def data(self, replicas: Replicas | None = None) -> tuple[TrainSource, EvalSource]:
        """Return this rank's part of the data. Every rank must call this method.

        Args:
            replicas: The replicas that take part; None for all.

        Raises:
            PetraError: If the data set cannot be used. Raised on every rank.
        """
        members = None if replicas is None else replicas.members
        train, test = data_sources(self.config.data, self.config.seed, self.plan.layout, self.config.trainer.timeout, members)
        test.unit = self.unit
        return train, test

    def learning_rate(self, microbatches_per_epoch: int) -> Schedule:
        """Return the learning rate schedule of all stages. With ``optim.scaling=goyal``, its peak depends on batch_size * k."""
        return recipe.learning_rate(self.config, microbatches_per_epoch)

    def recipe(self, learning_rate: Schedule) -> Recipe:
        """Return the training settings of the pipeline.

        Raises:
            ConfigError: If a value is out of range.
        """
        return Recipe(
            optimizer=recipe.optimizer(self.config),
            learning_rate=learning_rate,
            loss=recipe.losses(self.config),
            metrics=recipe.metrics(self.config.data, self.unit),
            seed=self.config.seed,
            rules=recipe.rules(self.config),
            remedies=_remedies(self.config, learning_rate.microbatches_per_epoch),
        )

    def pipeline(self, learning_rate: Schedule, replicas: Replicas | None = None) -> Pipeline:
        """Build this rank's part of the pipeline."""
        return Pipeline.from_plan(self.plan, self.recipe(learning_rate), self.runtime, replicas)

    @property
    def runtime(self) -> Runtime:
        """Device, transport, threads and compilation of this process."""
        trainer = self.config.trainer
        return Runtime(
            self.device,
            cast(TransportName, trainer.transport),
            trainer.concurrency,
            trainer.compile,
            overlap=trainer.overlap,
        )


def set_numerics(trainer: TrainerConfig) -> None:
    """Set torch's number of threads and its options that change the last bits of results."""
    torch.set_num_threads(trainer.threads)
    torch.set_float32_matmul_precision(trainer.matmul_precision)
    torch.backends.cudnn.allow_tf32 = trainer.matmul_precision != "highest"
    torch.backends.cudnn.benchmark = trainer.cudnn_benchmark
    torch.backends.cudnn.deterministic = not trainer.cudnn_benchmark


def set_up(config: Config, process: Process) -> Setup:
    """Check a configuration and make the plan of its run for the processes at hand.

    Raises:
        ConfigError, ModelError: If a value is not accepted. The message names the key.
    """
    check(config, process)
    register_own(config)
    _check_data_fits(config)
    stages = config.trainer.stages
    if stages == AUTO:
        stages = processes_per_replica(process.world, config.dp)
    device, model, method = process.device(config.trainer.device), _model(config), _method(config)
    if config.method.delay == AUTO:
        count = len(model.blocks) if stages is None else stages if isinstance(stages, int) else len(stages)
        method = replace(method, delay=largest_delay(method, config.k, count, 2))
    settings = {"stages": config.trainer.stages, "delay": config.method.delay, "keep": config.method.keep}
    setup = Setup(
        config=config,
        plan=_plan(config, model, method, stages, process.world, device),
        device=device,
        processes=process.world,
        auto=frozenset(name for name, value in settings.items() if value == AUTO),
    )
    check_runtime(setup.plan, setup.runtime, device)
    checked = setup.recipe(setup.learning_rate(microbatches_per_epoch=1))
    checked.check(setup.plan)
    for remedy in checked.remedies:
        remedy.prepare(checked.optimizer(torch.nn.Linear(1, 1)))  # raises if a remedy doesn't support the optimizer
    return setup


def numerics(trainer: TrainerConfig) -> Numerics:
    """Return the number formats and memory layouts of a run."""
    return Numerics(type_of(trainer.precision), trainer.channels_last, trainer.exact_streams, type_of(trainer.wire))


def type_of(precision: str) -> torch.dtype | None:
    """Return the type of a precision; None for float32, which leaves tensors as they are."""
    name = PRECISIONS[precision]
    return None if name is None else getattr(torch, name)


def _plan(
    config: Config, model: Model, method: Method, stages: int | list[int] | None, processes: int, device: torch.device
) -> Plan:
    (inputs, refetch), trainer = describe_inputs(config.data), config.trainer
    try:
        return make_plan(
            model,
            inputs,
            method=method,
            k=config.k,
            stages=stages,
            processes=processes,
            dp=config.dp,
            numerics=numerics(trainer),
            transport=cast(TransportName, trainer.transport),
            device_type=device.type,
            metrics=sum(map(size_of, recipe.metrics(config.data, _unit(config.data, inputs)).values())),
            # Two threads must not read the data at once.
            refetch=refetch and not (trainer.overlap and config.data.refetch == AUTO),
        )
    except ConfigError as error:  # names the argument
        raise ConfigError(re.sub("^stages: ", "trainer.stages: ", str(error))) from error


def _check_data_fits(config: Config) -> None:
    """Check that the model takes what the data set has: images, pixels or tokens. A model outside the package may take anything.

    Raises:
        ConfigError: If it does not. The message names both.
    """
    if is_own(config.model.name):
        return
    form, name = describe_inputs(config.data).spec, config.model.name
    unit = _unit(config.data, form)
    accepted = {
        "tokens": TOKEN_MODELS,
        "pixels": PIXEL_MODELS,
        "images": [own for own in MODELS if own not in (*TOKEN_MODELS, *PIXEL_MODELS)],
    }
    expected = "a model of images" if unit == "images" else alternatives(accepted[unit])
    require(name in accepted[unit], "model", f"{expected} with data={config.data.name}", name)
    if unit == "pixels":
        for key, side in (("height", form.shape[2]), ("size", form.shape[3])):
            require(side % OUTPUT_STRIDE == 0, f"data.{key}", f"a multiple of {OUTPUT_STRIDE} with model={name}", side)


def _unit(data: DataConfig, inputs: TensorSpec) -> str:
    if not inputs.dtype.is_floating_point:
        return "tokens"
    return "pixels" if data.name in PIXEL_DATASETS else "images"


def _model(config: Config) -> Model:
    """Build the model from the options that are set.

    Raises:
        ConfigError: If an option is set that the model does not have.
    """
    build = MODELS[config.model.name]
    given = options(config.model, "model", build)
    if given.get("stem") == AUTO:
        given["stem"] = "imagenet" if config.data.size > LARGEST_CIFAR_STEM else "cifar"
    size = {"size": config.data.size} if "size" in signature(build).parameters else {}
    require_arguments(config.model.name, build, "model.name", config.data.classes, **given, **size)
    model: object = build(config.data.classes, **given, **size)
    if not isinstance(model, Model):
        raise invalid("model.name", "a function that returns a petra.Model", f"{config.model.name}, which returns {model!r}")
    return model


def _method(config: Config) -> Method:
    """Build the method, with provisional values for settings that are ``auto``."""
    method = config.method
    return Method(
        method.name,
        delay=2 if method.delay == AUTO else _tuple(method.delay),
        keep=Keep.NOTHING if method.keep == AUTO else _keep(method.keep),
        weights=Weights(method.weights),
        flush=method.flush,
        fill=method.fill,
        max_updates=method.max_updates,
    )


def _keep(value: Any) -> Keep | tuple[Keep, ...]:
    return tuple(Keep(keep) for keep in value) if isinstance(value, list) else Keep(value)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _remedies(config: Config, microbatches_per_epoch: int) -> tuple[Remedy, ...]:
    """Return the remedies of a run. ``remedy.discount`` is in epochs."""
    section = config.remedy
    build = imported(section._target_, "remedy._target_")
    given = options(section, "remedy", build, ("_target_",))
    if section.discount is not None:
        given["discount"] = round(section.discount * microbatches_per_epoch)
    made = build(**given)
    return (made,) if isinstance(made, Remedy) else made
