"""Setup of a run from its configuration. Invalid configurations are rejected before any rank waits for another."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional as F

from petra.cost_model.delays import largest_delay
from petra.data import EvalSource, TrainSource
from petra.engine.endpoints import Losses
from petra.engine.metrics import Metric, correct_predictions, size_of
from petra.engine.options.metrics import top5_correct
from petra.engine.options.replicas import Replicas
from petra.engine.recipe import Recipe, Remedy
from petra.engine.update_rules import UpdateRules
from petra.errors import ConfigError, alternatives, require
from petra.inplace_abn import PIXEL_DATASETS, PIXEL_MODELS, ConfusionMatrix, bootstrapped_cross_entropy
from petra.inplace_abn.deeplab import OUTPUT_STRIDE
from petra.method import Keep, Method
from petra.model import Model
from petra.models import MODELS, TOKEN_MODELS
from petra.pipeline import Pipeline
from petra.plan import Plan, make_plan
from petra.plan.layout import processes_per_replica
from petra.settings import Numerics, Runtime
from petra.specs import TensorSpec
from petra.training import Schedule, peak_rate

from ..config.keys import is_shipped
from ..config.schema import AUTO, Config, DataConfig, TrainerConfig
from ..runtime.rank import Process
from .checks import check
from .data import data_sources, describe_inputs
from .targets import built, factory, takes

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
        return learning_rate(self.config, microbatches_per_epoch)

    def recipe(self, learning_rate: Schedule) -> Recipe:
        """Return the training settings of the pipeline.

        Raises:
            ConfigError: If a value is out of range.
        """
        rules = UpdateRules(**self.config.optim.rules)
        if self.config.trainer.precision == "fp16" and rules.loss_scale is None:
            rules = replace(rules, loss_scale="dynamic")
        return Recipe(
            optimizer=factory("optim", self.config.optim),
            learning_rate=learning_rate,
            loss=_losses(self.config),
            metrics=_metrics(self.config.data, self.unit),
            seed=self.config.seed,
            rules=rules,
            remedies=_remedies(self.config, learning_rate.microbatches_per_epoch),
        )

    def pipeline(self, learning_rate: Schedule, replicas: Replicas | None = None) -> Pipeline:
        """Build this rank's part of the pipeline."""
        return Pipeline.from_plan(self.plan, self.recipe(learning_rate), self.runtime, replicas)

    @property
    def runtime(self) -> Runtime:
        """Device, transport, threads and compilation of this process."""
        trainer = self.config.trainer
        return Runtime(self.device, trainer.transport, trainer.compile)


def learning_rate(config: Config, microbatches_per_epoch: int) -> Schedule:
    """Return the learning rate schedule of a configuration."""
    optim, lengths = config.optim, {"microbatches_per_epoch": microbatches_per_epoch, "epochs": config.trainer.epochs}
    peak = peak_rate(optim.lr, config.data.batch_size, config.k) if optim.scaling == "goyal" else optim.lr
    return built(Schedule, "schedule", config.schedule, peak=peak, **lengths)  # type: ignore[type-abstract]


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
    _check_data_fits(config)
    wanted = config.trainer.stages
    stages = processes_per_replica(process.world, config.dp) if wanted == "auto" else wanted
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
    return {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


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
            transport=trainer.transport,
            device_type=device.type,
            metrics=sum(map(size_of, _metrics(config.data, _unit(config.data, inputs)).values())),
            refetch=refetch,
        )
    except ConfigError as error:  # names the argument
        raise ConfigError(re.sub("^stages: ", "trainer.stages: ", str(error))) from error


def _check_data_fits(config: Config) -> None:
    """Check that the model takes what the data set has: images, pixels or tokens. A model outside the package may take anything.

    Raises:
        ConfigError: If it does not. The message names both.
    """
    if not is_shipped(config.model._target_):
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
    size = config.data.size
    automatic = config.model.options.get("stem") == AUTO
    stem = {"stem": "imagenet" if size > LARGEST_CIFAR_STEM else "cifar"} if automatic else {}
    return built(Model, "model", config.model, classes=config.data.classes, size=size, **stem)


def _method(config: Config) -> Method:
    """Build the method, with provisional values for settings that are ``auto``."""
    method = config.method
    delay, keep = 2 if method.delay == AUTO else method.delay, Keep.NOTHING if method.keep == AUTO else method.keep
    return built(Method, "method", method, name=method.name, delay=delay, keep=keep)


def _remedies(config: Config, microbatches_per_epoch: int) -> tuple[Remedy, ...]:
    """Return the remedies of a run. ``remedy.discount`` is in epochs."""
    build = factory("remedy", config.remedy)
    discount = {"discount": round(config.remedy.discount * microbatches_per_epoch)} if takes(build, "discount") else {}
    made = build(**discount)
    return (made,) if isinstance(made, Remedy) else made


def _losses(config: Config) -> Losses:
    """Return the losses of training and of evaluation. Only training smooths labels and selects pixels."""
    trainer = config.trainer
    training = partial(F.cross_entropy, label_smoothing=trainer.label_smoothing)
    if trainer.bootstrap is not None:
        training = partial(bootstrapped_cross_entropy, fraction=trainer.bootstrap, label_smoothing=trainer.label_smoothing)
    return Losses(training, F.cross_entropy)


def _metrics(data: DataConfig, unit: str) -> dict[str, Metric]:
    """Return the metrics: top-1 accuracy, top-5 accuracy for images of more than five classes, and for pixels the mIoU."""
    found: dict[str, Metric] = {"accuracy": correct_predictions}
    if unit == "images" and data.classes > 5:
        found["top5"] = top5_correct
    if unit == "pixels":
        found["miou"] = ConfusionMatrix(data.classes)
    return found
