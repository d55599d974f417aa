"""Setup of a run from its configuration. Invalid configurations are rejected before any rank waits for another."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from shutil import which
from typing import Any

import torch
from torch.nn import functional as F

from petra.cost_model.autotune import largest_delay
from petra.data import EvalSource, TrainSource
from petra.data.map_style import seeded_generators
from petra.engine.endpoints import Losses
from petra.engine.metrics import Metric, correct_predictions, size_of, top5_correct
from petra.engine.options.extension import Extension
from petra.engine.options.outer_step import OuterStep
from petra.engine.options.replicas import Replicas
from petra.engine.recipe import Recipe
from petra.errors import ConfigError, alternatives, require
from petra.inplace_abn import PIXEL_DATASETS, PIXEL_MODELS, ConfusionMatrix, bootstrapped_cross_entropy
from petra.inplace_abn.deeplab import OUTPUT_STRIDE
from petra.method import Keep, Method
from petra.model import BlockProfile, Model
from petra.models import MODELS, TOKEN_MODELS
from petra.pipeline import Pipeline
from petra.plan import Plan, make_plan
from petra.plan.layout import processes_per_replica
from petra.settings import Numerics, Runtime
from petra.specs import TensorSpec
from petra.torch_private import cpp_compiler
from petra.training import FORMATS, Schedule, peak_rate
from petra.training.weight_files import check_format

from ..config.keys import is_shipped
from ..config.schema import AUTO, Config, DataConfig, TrainerConfig
from ..runtime.rank import Process
from .data import data_sources, describe_inputs, unit_of
from .targets import built, factory, imported, optimizer_factory, takes

THREADS = "OMP_NUM_THREADS"
"""Variable with the number of compute threads of a process. Results are equal bit for bit only for the same number."""
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
        limit: Memory of a stage in GB within which ``keep`` was chosen: ``trainer.memory_limit``, or what GPUs had free. None if it
            was not chosen.
    """

    config: Config
    plan: Plan
    device: torch.device
    processes: int
    auto: frozenset[str]
    limit: float | None = None

    @property
    def unit(self) -> str:
        """Unit in which targets are counted: ``images``, ``tokens`` or ``pixels``."""
        return unit_of(self.config.data, self.plan.inputs)

    @property
    def choices(self) -> dict[str, Any]:
        """What ``auto`` stands for: the blocks in each of the ``stages``, the boundary ``delay``, and what each block ``keep``s.

        With the ``limit`` within which that was chosen.
        """
        found = {"stages": [len(stage) for stage in self.plan.layout.stages], "delay": self.plan.method.delay}
        chosen = self.config.method.keep == AUTO and not isinstance(self.plan.method.keep, Keep)
        return found | ({"keep": [*map(str, self.plan.method.keep)], "limit": self.limit} if chosen else {})

    def with_choice(
        self,
        stages: Sequence[int],
        delay: int | Sequence[int],
        method: Method | None = None,
        keep: Sequence[Keep | str] | None = None,
    ) -> Setup:
        """Return the setup with the chosen values for all settings that were ``auto``, for its own or another method.

        If no block after the first stores its input by a choice of ``keep``, the plan is one without ``trainer.stored_format``.
        """
        method = replace(method or self.plan.method, delay=delay if isinstance(delay, int) else tuple(delay))
        method = method if keep is None else replace(method, keep=tuple(map(Keep, keep)))
        config, stored = self.config, self.config.trainer.stored_format
        if keep is not None:
            config = replace(config, trainer=replace(config.trainer, stored_format=None))
        plan = _plan(config, self.plan.model, method, list(stages), self.processes, self.device)
        if Keep.INPUT in [keep for stage in plan.stages for keep in stage.keeps][1:]:
            plan = replace(plan, numerics=replace(plan.numerics, stored_format=stored))
        return replace(self, plan=plan, auto=frozenset())

    def data(self, replicas: Replicas | None = None) -> tuple[TrainSource, EvalSource]:
        """Return this rank's part of the data, for the replicas that take part (None: all). See :func:`data_sources`."""
        members = None if replicas is None else replicas.members
        return data_sources(self.config.data, self.config.seed, self.plan.layout, self.config.trainer.timeout, members)

    def recipe(self, microbatches_per_epoch: int = 1) -> Recipe:
        """Return the training settings of the pipeline. Only the loss of training smooths labels and selects pixels.

        Raises:
            ConfigError: If a value is out of range.
        """
        config, trainer, rules = self.config, self.config.trainer, self.config.optim.rules
        if trainer.precision == "fp16" and rules.loss_scale is None:
            rules = replace(rules, loss_scale="dynamic")
        loss = partial(F.cross_entropy, label_smoothing=trainer.label_smoothing)
        if trainer.bootstrap is not None:
            loss = partial(bootstrapped_cross_entropy, fraction=trainer.bootstrap, label_smoothing=trainer.label_smoothing)
        build, epochs = factory("remedy", config.remedy), config.remedy.discount
        require(takes(build, "discount") or not epochs, "remedy.discount", f"0 with {config.remedy._target_}", epochs)
        until = max(1, round(epochs * microbatches_per_epoch)) if epochs else 0
        remedies = build(**({"discount": until} if takes(build, "discount") else {}))
        extensions = [remedies] if isinstance(remedies, Extension) else [*remedies]
        outer = built(Extension, "outer", config.outer)
        return Recipe(
            optimizer=optimizer_factory(config.optim),
            learning_rate=learning_rate(config, microbatches_per_epoch),
            loss=Losses(loss, F.cross_entropy),
            metrics=_metrics(config.data, self.unit),
            seed=config.seed,
            rules=rules,
            extensions=[*extensions, *([outer] if getattr(outer, "every", True) else [])],
        )

    @property
    def outer(self) -> OuterStep:
        """Outer steps of replicas; every 0 updates if these sum their gradients."""
        return next((each for each in self.recipe().extensions if isinstance(each, OuterStep)), OuterStep())

    def pipeline(self, microbatches_per_epoch: int = 1, replicas: Replicas | None = None) -> Pipeline:
        """Build this rank's part of the pipeline."""
        runtime = Runtime(self.device, self.config.trainer.transport, self.config.trainer.compile)
        return Pipeline.from_plan(self.plan, self.recipe(microbatches_per_epoch), runtime, replicas)


def learning_rate(config: Config, microbatches_per_epoch: int) -> Schedule:
    """Return the learning rate schedule of all stages. With ``optim.scaling=goyal``, its peak depends on batch_size * k."""
    optim, lengths = config.optim, {"microbatches_per_epoch": microbatches_per_epoch, "epochs": config.trainer.epochs}
    peak = peak_rate(optim.lr, config.data.batch_size, config.k) if optim.scaling == "goyal" else optim.lr
    return built(Schedule, "schedule", config.schedule, peak=peak, **lengths)  # type: ignore[type-abstract]


def set_numerics(trainer: TrainerConfig) -> None:
    """Set torch's number of threads, one by default, and its options that change the last bits of results."""
    if THREADS not in os.environ:
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision(trainer.matmul_precision)
    torch.backends.cudnn.allow_tf32 = trainer.matmul_precision != "highest"
    torch.backends.cudnn.benchmark = trainer.cudnn_benchmark
    torch.backends.cudnn.deterministic = not trainer.cudnn_benchmark


def set_up(config: Config, process: Process, *, training: bool = True) -> Setup:
    """Check a configuration and make the plan of its run for the processes at hand.

    Args:
        training: Whether the run trains. Otherwise blocks need to accept their inputs in evaluation only: batch norm of one value.

    Raises:
        ConfigError, ModelError: If a value is not accepted. The message names the key.
    """
    check(config, process)
    _check_data_fits(config)
    wanted = config.trainer.stages
    device, model = process.device(config.trainer.device), model_of(config)
    stages = min(processes_per_replica(process.world, config.dp), len(model.blocks)) if wanted == "auto" else wanted
    model = _ProfiledOnce(model.name, model.blocks)
    if not training:
        model = replace(model, blocks=tuple(replace(block, build=partial(_in_evaluation, block.build)) for block in model.blocks))
    settings = {"stages": wanted, "delay": config.method.delay, "keep": config.method.keep}
    auto = frozenset(name for name, value in settings.items() if value == AUTO)
    delay, keep = 2 if "delay" in auto else config.method.delay, Keep.NOTHING if "keep" in auto else config.method.keep
    method = built(Method, "method", config.method, name=config.method.name, delay=delay, keep=keep)
    if "delay" in auto:
        count = len(model.blocks) if stages is None else stages if isinstance(stages, int) else len(stages)
        method = replace(method, delay=largest_delay(method, config.k, count, 2))
    setup = Setup(config, _plan(config, model, method, stages, process.world, device), device, process.world, auto)
    idle = not all(setup.plan.layout.processes)
    require(not config.cluster.elastic or not idle, "cluster.elastic", "false if processes have no stage", "true")
    checked = setup.recipe()
    checked.check(setup.plan)
    for extension in checked.extensions:
        extension.prepare(checked.optimizer(torch.nn.Linear(1, 1)))  # raises if one doesn't support the optimizer
    return setup


class _ProfiledOnce(Model):
    """A model of which plans are made for many settings. The functions of a configuration build equal blocks each time."""

    def profile(self, inputs: TensorSpec) -> tuple[BlockProfile, ...]:
        known: dict[TensorSpec, tuple[BlockProfile, ...]] = vars(self).setdefault("profiles", {})
        if inputs not in known:
            known[inputs] = super().profile(inputs)
        return known[inputs]


def _in_evaluation(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    return build().eval()


def model_of(config: Config) -> Model:
    """Return the model of a configuration."""
    data, automatic = config.data, config.model.options.get("stem") == AUTO
    stem = {"stem": "imagenet" if data.size > LARGEST_CIFAR_STEM else "cifar"} if automatic else {}
    with seeded_generators(config.seed):  # modules that it makes have the same weights in all processes
        return built(Model, "model", config.model, classes=data.classes, size=data.size, **stem)


def check(config: Config, process: Process) -> None:
    """Check combinations of keys, and keys that depend on the number of processes.

    Raises:
        ConfigError: If a value is not accepted. The message names the key.
    """
    trainer, alone = config.trainer, process.world == 1
    threads = os.environ.get(THREADS, "1").partition(",")[0].strip()  # OpenMP takes the cores of the machine for any other text
    require(threads.isdecimal() and int(threads) > 0, f"environment variable {THREADS}", "an integer >= 1", threads or "nothing")
    located = config.resume is None or config.run_dir is not None
    require(located, "resume", "auto only with run_dir=<the run's folder>", AUTO)
    require(config.resume_change is None or config.resume is not None, "resume_change", "null without resume", config.resume_change)
    require(config.init_skip is None or config.init_from is not None, "init_skip", "null without init_from", config.init_skip)
    getattr(imported("logger._target_", config.logger._target_), "require", lambda: None)()  # raises if it is not installed
    if trainer.compile not in (None, "eager", "aot_eager"):
        _require_compiler(process.device(trainer.device).type)
    if trainer.export != "none":
        check_format(FORMATS[trainer.export])
    got = f"{trainer.diagnose} in {process.world} processes"
    require(trainer.diagnose is None or alone, "trainer.diagnose", "null, or one process", got)
    stores = config.method.keep == AUTO
    fits = trainer.memory_limit is None or trainer.stages == AUTO or stores
    expected = "null, or a number > 0 with trainer.stages=auto or method.keep=auto"
    require(fits, "trainer.memory_limit", expected, trainer.memory_limit)
    limited = not stores or trainer.memory_limit is not None or process.device(trainer.device).type == "cuda"
    require(limited, "trainer.memory_limit", "a number > 0 with method.keep=auto on a CPU", "null")
    fixed = not config.method.options.get("fill") or config.method.delay != AUTO
    require(fixed, "method.delay", "an integer >= 0 with method.fill=true", AUTO)
    if config.cluster.elastic:  # the run can lose replicas
        require(config.dp > 1, "cluster.elastic", "false without replicas (dp > 1)", "true")
        require(not config.optim.rules.shard, "optim.shard", "false with cluster.elastic=true", "true")
        require(config.optim.rules.weights == "float32", "optim.weights", "float32 with cluster.elastic=true", "bf16")
        require(config.checkpoint.every is not None, "checkpoint.every", "an integer >= 1 with cluster.elastic=true", "null")
        require(config.resume == AUTO, "cluster.elastic", "false without run_dir and resume=auto", "true")
        require(process.device(trainer.device).type == "cpu", "cluster.elastic", "false on GPUs", "true")
        require(not trainer.exact_streams, "trainer.exact_streams", "false with cluster.elastic=true", "true")
        automatic = AUTO in (trainer.stages, config.method.delay, config.method.keep)
        require(not automatic, "cluster.elastic", "false with automatic settings", "true")
    selects = trainer.bootstrap is None or config.data.name in PIXEL_DATASETS
    require(selects, "trainer.bootstrap", f"null with data={config.data.name}, which has no pixels", trainer.bootstrap)
    optimizer, rules = config.optim.options, config.optim.rules
    momentum = not optimizer.get("nesterov") or optimizer.get("momentum") != 0
    require(momentum, "optim.nesterov", "false with optim.momentum=0", True)
    scaled = rules.loss_scale is None or trainer.precision == "fp16"
    require(scaled, "optim.loss_scale", f"null with trainer.precision={trainer.precision}", rules.loss_scale)


def _require_compiler(device: str) -> None:
    """Check that there is a compiler for what inductor writes: C++ on a CPU; on a GPU, C for the modules that start kernels.

    Raises:
        ConfigError: If there is none.
    """
    language, variable, usual = ("C++", "CXX", "g++") if device == "cpu" else ("C", "CC", "gcc")
    try:
        found = cpp_compiler() if device == "cpu" else which(os.environ.get("CC", "gcc")) or which("clang")
    except Exception:  # of private classes
        found = None
    expected = f"null, eager or aot_eager without a {language} compiler ({usual}, or the one in {variable})"
    require(found is not None, "trainer.compile", expected, f"{os.environ.get(variable, 'none')}, which does not run")


def type_of(precision: str) -> torch.dtype | None:
    """Return the type of a precision; None for float32, which leaves tensors as they are."""
    return {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _plan(config: Config, model: Model, method: Method, stages: int | list[int] | None, world: int, device: torch.device) -> Plan:
    (inputs, refetch), trainer = describe_inputs(config.data), config.trainer
    formats = trainer.message_format, trainer.gradient_format, trainer.stored_format
    numerics = Numerics(type_of(trainer.precision), trainer.channels_last, trainer.exact_streams, *formats)
    try:
        return make_plan(
            model,
            inputs,
            method=method,
            k=config.k,
            stages=stages,
            processes=world,
            dp=config.dp,
            numerics=numerics,
            transport=trainer.transport,
            device_type=device.type,
            metrics=sum(map(size_of, _metrics(config.data, unit_of(config.data, inputs)).values())),
            refetch=refetch,
        )
    except ConfigError as error:  # names the argument
        raise ConfigError(re.sub("^(stages|transport|exact_streams|stored_format): ", r"trainer.\1: ", str(error))) from error


def _check_data_fits(config: Config) -> None:
    """Check that the model takes what the data set has: images, pixels or tokens. A model outside the package may take anything."""
    (form, _), name = describe_inputs(config.data), config.model.name
    unit = unit_of(config.data, form)
    images = [own for own in MODELS if own not in (*TOKEN_MODELS, *PIXEL_MODELS)]
    accepted = {"tokens": TOKEN_MODELS, "pixels": PIXEL_MODELS, "images": images}[unit]
    expected = "a model of images" if unit == "images" else alternatives(accepted)
    require(name in accepted or not is_shipped(config.model._target_), "model", f"{expected} with data={config.data.name}", name)
    if name in PIXEL_MODELS:
        for key, side in (("height", form.shape[2]), ("size", form.shape[3])):
            require(side % OUTPUT_STRIDE == 0, f"data.{key}", f"a multiple of {OUTPUT_STRIDE} with model={name}", side)


def _metrics(data: DataConfig, unit: str) -> dict[str, Metric]:
    """Return the metrics: top-1 accuracy, top-5 accuracy for images of more than five classes, and for pixels the mIoU."""
    found: dict[str, Metric] = {"accuracy": correct_predictions}
    if unit == "images" and data.classes > 5:
        found["top5"] = top5_correct
    if unit == "pixels":
        found["miou"] = ConfusionMatrix(data.classes)
    return found
