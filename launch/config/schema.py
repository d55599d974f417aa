"""The schema of a configuration: the type of each key and the check of its value. The files under conf/ explain the keys.

Checks that need several keys, the data, or the number of processes are made where these come together, in ``launch/run``. Ranges
that petra's own classes check (``Method``, ``Remedy``, ``UpdateRules``, ``Schedule``) are not repeated here. This room imports no
torch, so that a command reports an invalid value at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from petra.method import STORABLE, Weights

from .checks import SAME_RESULTS, as_list, integer, is_integer, number, one_of, require_valid, satisfies
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
DRY_RUN = satisfies(lambda value: value in (False, True, MEMORY), f"true, false or {MEMORY}")
NAMES = satisfies(lambda names: bool(names) and all(names), "a list of names")
REFETCH = satisfies(lambda value: value in (AUTO, True, False), "true, false or auto")
STAGES = satisfies(
    lambda value: value in (None, AUTO) or (as_list(value) != [] and all(is_integer(n) and n >= 1 for n in as_list(value))),
    "null, an integer >= 1, auto, or a list with the number of blocks in each stage",
)


@dataclass
class ModelConfig:
    """The model's name, and the options of all models. An option that is null keeps the model's default."""

    name: Annotated[str, one_of_or_own(MODELS)] = MISSING
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

    name: Annotated[str, one_of_or_own(DATASETS)] = MISSING
    root: Annotated[str | None, SAME_RESULTS] = None
    batch_size: Annotated[int, integer(1, 10**6)] = MISSING
    augment: bool = MISSING
    classes: Annotated[int, integer(1, 10**7)] = MISSING
    size: Annotated[int, integer(1, 10**6)] = MISSING
    workers: Annotated[int, integer(0, 1000), SAME_RESULTS] = MISSING
    refetch: Annotated[Any, REFETCH, SAME_RESULTS] = AUTO
    images: int | None = None
    validation: float | None = None
    mean_image: bool | None = None
    distort: bool | None = None
    height: Annotated[int | None, integer(1, 10**6)] = None
    void: int | None = None
    sampling: str | None = None
    crop: str | None = None
    jitter: bool | None = None
    crops: int | None = None
    split: Annotated[str | None, SAME_RESULTS] = None


@dataclass
class MethodConfig:
    """The training method, see :class:`petra.method.Method`."""

    name: str = MISSING
    delay: Annotated[Any, DELAY] = MISSING
    keep: Annotated[Any, KEEP] = MISSING
    weights: Annotated[str, one_of(tuple(Weights))] = MISSING
    flush: bool = MISSING
    fill: bool = MISSING
    max_updates: int | None = None


@dataclass
class RemedyConfig:
    """Remedies for staleness, see :func:`petra.staleness.remedies`. ``discount`` is in epochs here. Null keeps the default."""

    name: str = MISSING
    _target_: str = "petra.staleness.remedies"
    discount: Annotated[float | None, number(least=0)] = None
    correction: float | None = None
    prediction: Annotated[str | None, one_of(PREDICTIONS)] = None
    horizon: float | None = None
    predict_backward: bool | None = None
    feedback: float | None = None


@dataclass
class OptimConfig:
    """The optimizer, and the rules of an update. Options that are null keep the optimizer's defaults."""

    name: Annotated[str, one_of(OPTIMIZERS)] = MISSING
    lr: Annotated[float, number(least=0)] = MISSING
    scaling: Annotated[str, one_of(("goyal", "none"))] = MISSING
    clip: float | None = None
    clip_scope: Annotated[str, one_of(("stage", "global"))] = "stage"
    ema: float | None = None
    momentum: Annotated[float | None, number(least=0, below=1)] = None
    nesterov: bool | None = None
    weight_decay: Annotated[float | None, number(least=0)] = None
    trust: Annotated[float | None, number(above=0)] = None
    betas: Annotated[list[float] | None, BETAS] = None
    eps: Annotated[float | None, number(above=0)] = None
    frequency: Annotated[int | None, integer(1)] = None


@dataclass
class ScheduleConfig:
    """The learning rate schedule. Options that are null keep the schedule's defaults."""

    name: Annotated[str, one_of(SCHEDULES)] = MISSING
    warmup_epochs: float = MISSING
    milestones: list[int] | None = None
    gamma: float | None = None
    power: float | None = None
    final: float | None = None


@dataclass
class TrainerConfig:
    """Length of the run, stages, numerics, the runtime, and diagnostics."""

    epochs: Annotated[int, integer(1), SAME_RESULTS] = MISSING
    stages: Annotated[Any, STAGES, SAME_RESULTS] = None
    transport: Annotated[str, one_of((AUTO, "local", "lockstep", "edge")), SAME_RESULTS] = MISSING
    precision: Annotated[str, one_of(PRECISIONS)] = MISSING
    exact_streams: bool = MISSING
    wire: Annotated[str, one_of(WIRES)] = MISSING
    loss_scale: Any = None
    nonfinite: str = MISSING
    label_smoothing: Annotated[float, number(least=0, below=1)] = MISSING
    bootstrap: Annotated[float | None, number(above=0, most=1)] = None
    channels_last: Annotated[bool, SAME_RESULTS] = MISSING
    matmul_precision: Annotated[str, one_of(("highest", "high", "medium")), SAME_RESULTS] = MISSING
    cudnn_benchmark: Annotated[bool, SAME_RESULTS] = MISSING
    compile: Annotated[str | None, one_of(COMPILERS), SAME_RESULTS] = None
    limit_batches: Annotated[int | None, integer(1)] = None
    export: Annotated[str, one_of(("none", *FORMATS)), SAME_RESULTS] = MISSING
    threads: Annotated[int, integer(1, 1000), SAME_RESULTS] = MISSING
    concurrency: Annotated[int, integer(1, 1000), SAME_RESULTS] = MISSING
    overlap: Annotated[bool, SAME_RESULTS] = MISSING
    device: Annotated[str, one_of((AUTO, "cpu", "cuda")), SAME_RESULTS] = MISSING
    timeout: Annotated[float, number(above=0, most=LONGEST_TIMEOUT), SAME_RESULTS] = MISSING
    memory_limit: Annotated[float | None, number(above=0), SAME_RESULTS] = None
    log_every: Annotated[int | None, integer(1), SAME_RESULTS] = None
    trace: Annotated[int | None, integer(1), SAME_RESULTS] = None
    stage_metrics: Annotated[bool, SAME_RESULTS] = False
    drift: Annotated[float | None, number(above=0), SAME_RESULTS] = None
    diagnose: Annotated[int | None, integer(1), SAME_RESULTS] = None


@dataclass
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: Annotated[int | None, integer(1)] = None
    keep: Annotated[int, integer(0)] = MISSING
    background: bool = MISSING


@dataclass
class ClusterConfig:
    """Settings of NCCL and gloo, see :func:`launch.runtime.network.variables`."""

    machines: str | None = None
    interfaces: Annotated[list[str] | None, NAMES] = None
    infiniband: bool = MISSING
    adapters: Annotated[list[str] | None, NAMES] = None
    debug: Annotated[str, one_of(("VERSION", "WARN", "INFO", "TRACE"))] = MISSING
    heartbeat: Annotated[int, integer(1)] = MISSING
    flight_recorder: Annotated[int, integer(0)] = MISSING
    dumps: str | None = None
    elastic: bool = False


@dataclass
class LoggerConfig:
    """Where metrics are logged besides metrics.jsonl."""

    name: Annotated[str, one_of(("jsonl", "wandb", "tensorboard"))] = MISSING
    project: str = "petra"
    mode: Annotated[str, one_of(("offline", "online"))] = "offline"


@dataclass
class Config:
    """A whole run."""

    k: Annotated[int, integer(1)] = MISSING
    dp: Annotated[int, SAME_RESULTS] = MISSING
    seed: Annotated[int, integer(0)] = MISSING
    run_dir: Annotated[str | None, SAME_RESULTS] = None
    resume: Annotated[str | None, SAME_RESULTS] = None
    resume_change: Annotated[list[str] | None, NAMES, SAME_RESULTS] = None
    init_from: Annotated[str | None, SAME_RESULTS] = None
    init_skip: Annotated[list[str] | None, NAMES, SAME_RESULTS] = None
    dry_run: Annotated[Any, DRY_RUN, SAME_RESULTS] = MISSING
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    method: MethodConfig = MISSING
    remedy: RemedyConfig = MISSING
    optim: OptimConfig = MISSING
    schedule: ScheduleConfig = MISSING
    trainer: TrainerConfig = MISSING
    checkpoint: Annotated[CheckpointConfig, SAME_RESULTS] = MISSING
    cluster: Annotated[ClusterConfig, SAME_RESULTS] = MISSING
    logger: Annotated[LoggerConfig, SAME_RESULTS] = MISSING


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
