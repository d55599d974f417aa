"""The schema of a configuration: the type of each key and the check of its value. The files under conf/ explain the keys.

Checks that need several keys, the data, or the number of processes are made where these come together, in ``launch/run``. Ranges
that petra's own classes check (``Method``, ``Remedy``, ``UpdateRules``, ``Schedule``) are not repeated here. This room imports no
torch, so that a command reports an invalid value at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from petra.method import STORABLE, Weights

from .checks import as_list, integer, is_integer, key, number, one_of, require_valid, satisfies
from .errors import config_error
from .names import DATASETS, FORMATS, MODELS, OPTIMIZERS, PRECISIONS, PREDICTIONS, SCHEDULES, WIRES, one_of_or_own
from .presets import presets

AUTO = "auto"
MEMORY = "memory"
"""Value of ``dry_run`` that also predicts memory."""
COMPILERS = (
    *("eager", "aot_eager", "inductor"),
    *("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
)
"""Backends of ``torch.compile``, and modes of its backend inductor."""
LONGEST_TIMEOUT = 10**7
"""Seconds. torch refuses much longer timeouts."""

BETAS = satisfies(lambda values: len(values) == 2 and all(0 <= beta < 1 for beta in values), "a list of two numbers >= 0 and < 1")
DELAY = satisfies(
    lambda value: value == AUTO or all(is_integer(d) and d >= 0 for d in as_list(value)),
    "an integer >= 0, a list with one for each boundary, or auto",
)
KEEP = satisfies(
    lambda value: value == AUTO or all(keep in STORABLE for keep in as_list(value)),
    "graph, input, nothing, a list with one of these for each block, or auto",
)
NAMES = satisfies(lambda names: bool(names) and all(names), "a list of names")
STAGES = satisfies(
    lambda value: value in (None, AUTO) or (as_list(value) != [] and all(is_integer(n) and n >= 1 for n in as_list(value))),
    "null, an integer >= 1, auto, or a list with the number of blocks in each stage",
)


@dataclass
class ModelConfig:
    """The model's name, and the options of all models. An option that is null keeps the model's default."""

    name: str = key(one_of_or_own(MODELS))
    body: str | None = None
    width: float | None = None
    stem: str | None = None
    downsampling: str | None = None
    partition: str | None = None
    patch: int | None = None
    dim: int | None = None
    depth: int | None = None
    heads: int | None = None
    dropout: float | None = None
    norm: str | None = None
    activation: str | None = None
    cardinality: int | None = None
    base_width: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    mlp: str | None = None
    bias: bool | None = None
    positions: str | None = None
    qk_norm: bool | None = None
    delimiter: int | None = None
    embedding_std: float | None = None
    coupling: str | None = None
    step: float | None = None

    def options(self) -> dict[str, Any]:
        """Return the options that are not null."""
        return {name: value for name, value in asdict(self).items() if name != "name" and value is not None}


@dataclass
class DataConfig:
    """The data set, and how it is read."""

    name: str = key(one_of_or_own(DATASETS))
    root: str | None = None
    batch_size: int = key(integer(1, 10**6))
    augment: bool = MISSING
    classes: int = key(integer(1, 10**7))
    size: int = key(integer(1, 10**6))
    workers: int = key(integer(0, 1000))
    refetch: Any = key(satisfies(lambda value: value in (AUTO, True, False), "true, false or auto"), AUTO)
    images: int | None = None
    validation: float | None = None
    mean_image: bool | None = None
    distort: bool | None = None
    height: int | None = key(integer(1, 10**6), None)
    void: int | None = None
    sampling: str | None = None
    crop: str | None = None
    jitter: bool | None = None
    crops: int | None = None
    split: str | None = None


@dataclass
class MethodConfig:
    """The training method, see :class:`petra.method.Method`."""

    name: str = MISSING
    delay: Any = key(DELAY)
    keep: Any = key(KEEP)
    weights: str = key(one_of(tuple(Weights)))
    flush: bool = MISSING
    fill: bool = MISSING
    max_updates: int | None = None


@dataclass
class RemedyConfig:
    """Remedies for staleness, see :class:`petra.staleness.Remedy`. ``discount`` is in epochs here."""

    name: str = MISSING
    discount: float = key(number(least=0))
    correction: float = MISSING
    prediction: str = key(one_of(PREDICTIONS))
    horizon: float = MISSING
    compensation: bool = MISSING
    shrink: float = MISSING
    lookahead: float = MISSING
    predict_backward: bool = MISSING
    feedback: float = MISSING
    delay_compensation: float = MISSING
    braking: float = MISSING


@dataclass
class OptimConfig:
    """The optimizer, and the rules of an update. Options that are null keep the optimizer's defaults."""

    name: str = key(one_of(OPTIMIZERS))
    lr: float = key(number(least=0))
    scaling: str = key(one_of(("goyal", "none")))
    clip: float | None = None
    clip_scope: str = key(one_of(("stage", "global")), "stage")
    ema: float | None = None
    momentum: float | None = key(number(least=0, below=1), None)
    nesterov: bool | None = None
    weight_decay: float | None = key(number(least=0), None)
    trust: float | None = key(number(above=0), None)
    betas: list[float] | None = key(BETAS, None)
    eps: float | None = key(number(above=0), None)
    frequency: int | None = key(integer(1), None)


@dataclass
class ScheduleConfig:
    """The learning rate schedule. Options that are null keep the schedule's defaults."""

    name: str = key(one_of(SCHEDULES))
    warmup_epochs: float = MISSING
    milestones: list[int] | None = None
    gamma: float | None = None
    power: float | None = None
    final: float | None = None


@dataclass
class TrainerConfig:
    """Length of the run, stages, numerics, the runtime, and diagnostics."""

    epochs: int = key(integer(1))
    stages: Any = key(STAGES, None)
    transport: str = key(one_of((AUTO, "local", "lockstep", "edge")))
    precision: str = key(one_of(PRECISIONS))
    exact_streams: bool = MISSING
    wire: str = key(one_of(WIRES))
    loss_scale: Any = None
    nonfinite: str = MISSING
    label_smoothing: float = key(number(least=0, below=1))
    bootstrap: float | None = key(number(above=0, most=1), None)
    channels_last: bool = MISSING
    matmul_precision: str = key(one_of(("highest", "high", "medium")))
    cudnn_benchmark: bool = MISSING
    compile: str | None = key(one_of(COMPILERS), None)
    limit_batches: int | None = key(integer(1), None)
    export: str = key(one_of(("none", *FORMATS)))
    threads: int = key(integer(1, 1000))
    concurrency: int = key(integer(1, 1000))
    overlap: bool = MISSING
    device: str = key(one_of((AUTO, "cpu", "cuda")))
    timeout: float = key(number(above=0, most=LONGEST_TIMEOUT))
    memory_limit: float | None = key(number(above=0), None)
    log_every: int | None = key(integer(1), None)
    trace: int | None = key(integer(1), None)
    stage_metrics: bool = False
    drift: float | None = key(number(above=0), None)
    diagnose: int | None = key(integer(1), None)


@dataclass
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: int | None = key(integer(1), None)
    keep: int = key(integer(0))
    background: bool = MISSING


@dataclass
class ClusterConfig:
    """Settings of NCCL and gloo, see :func:`launch.runtime.network.variables`."""

    machines: str | None = None
    interfaces: list[str] | None = key(NAMES, None)
    infiniband: bool = MISSING
    adapters: list[str] | None = key(NAMES, None)
    debug: str = key(one_of(("VERSION", "WARN", "INFO", "TRACE")))
    heartbeat: int = key(integer(1))
    flight_recorder: int = key(integer(0))
    dumps: str | None = None
    elastic: bool = False


@dataclass
class LoggerConfig:
    """Where metrics are logged besides metrics.jsonl."""

    name: str = key(one_of(("jsonl", "wandb", "tensorboard")))
    project: str = "petra"
    mode: str = key(one_of(("offline", "online")), "offline")


@dataclass
class Config:
    """A whole run."""

    k: int = key(integer(1))
    dp: int = MISSING
    seed: int = key(integer(0))
    run_dir: str | None = None
    resume: str | None = None
    resume_change: list[str] | None = key(NAMES, None)
    init_from: str | None = None
    init_skip: list[str] | None = key(NAMES, None)
    dry_run: Any = key(satisfies(lambda value: value in (False, True, MEMORY), f"true, false or {MEMORY}"))
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    method: MethodConfig = MISSING
    remedy: RemedyConfig = MISSING
    optim: OptimConfig = MISSING
    schedule: ScheduleConfig = MISSING
    trainer: TrainerConfig = MISSING
    checkpoint: CheckpointConfig = MISSING
    cluster: ClusterConfig = MISSING
    logger: LoggerConfig = MISSING


def register() -> None:
    """Register with Hydra the schema, the first entry of the defaults in conf/config.yaml, and the configurations without files."""
    store = ConfigStore.instance()
    store.store("schema", Config)
    for group, package in (("method", "method"), ("experiment", "_global_")):
        for name, node in presets(group).items():
            folder, _, leaf = f"{group}/{name}".rpartition("/")
            store.store(leaf, node, folder, package)


def to_config(composed: DictConfig) -> Config:
    """Convert a composed configuration to an object of the schema, and check the value of each key.

    Raises:
        ConfigError: If a key is unknown (Hydra accepts any with ``+key=value``), has no value, or a value that is not accepted.
    """
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(composed, resolve=True)))
    except OmegaConfBaseException as error:
        raise config_error(error, Config) from error
    assert isinstance(config, Config)
    require_valid(config)
    return config
