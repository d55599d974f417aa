"""The form of a configuration: unknown keys and wrong types are refused. The files under conf/ say what each key means."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.config.errors import reason, require_lists
from petra.errors import ConfigError


@dataclass
class ModelConfig:
    """The name, and the options of all models; those that are null are left to the model."""

    name: str = MISSING
    width: float | None = None
    stem: str | None = None
    downsampling: str | None = None
    patch: int | None = None
    dim: int | None = None
    depth: int | None = None
    heads: int | None = None
    dropout: float | None = None
    norm: str | None = None
    activation: str | None = None
    cardinality: int | None = None
    base_width: int | None = None

    def options(self) -> dict[str, Any]:
        """Those that are set."""
        return {key: value for key, value in asdict(self).items() if key != "name" and value is not None}


@dataclass
class DataConfig:
    name: str = MISSING
    root: str | None = None
    batch_size: int = MISSING
    augment: bool = MISSING
    classes: int = MISSING
    size: int = MISSING
    workers: int = MISSING
    images: int | None = None
    validation: float | None = None


@dataclass
class MethodConfig:
    name: str = MISSING
    delay: Any = MISSING
    keep: Any = MISSING
    weights: str = MISSING
    flush: bool = MISSING
    fill: bool = MISSING


@dataclass
class RemedyConfig:
    name: str = MISSING
    discount: float = MISSING
    correction: float = MISSING
    prediction: str = MISSING
    horizon: float = MISSING
    compensation: bool = MISSING
    shrink: float = MISSING
    lookahead: float = MISSING


@dataclass
class OptimConfig:
    name: str = MISSING
    lr: float = MISSING
    scaling: str = MISSING
    clip: float | None = None
    clip_scope: str = "stage"
    ema: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    weight_decay: float | None = None
    trust: float | None = None
    betas: list[float] | None = None
    eps: float | None = None


@dataclass
class ScheduleConfig:
    name: str = MISSING
    warmup_epochs: float = MISSING
    milestones: list[int] | None = None
    gamma: float | None = None
    power: float | None = None


@dataclass
class TrainerConfig:
    epochs: int = MISSING
    stages: Any = None
    transport: str = MISSING
    precision: str = MISSING
    exact_streams: bool = MISSING
    wire: str = MISSING
    loss_scale: Any = None
    nonfinite: str = MISSING
    label_smoothing: float = MISSING
    channels_last: bool = MISSING
    compile: str | None = None
    limit_batches: int | None = None
    export: str = MISSING
    threads: int = MISSING
    concurrency: int = MISSING
    device: str = MISSING
    timeout: float = MISSING
    memory_limit: float | None = None
    trace: int | None = None
    stage_metrics: bool = False
    drift: float | None = None
    diagnose: int | None = None


@dataclass
class CheckpointConfig:
    every: int | None = None
    keep: int = MISSING
    background: bool = MISSING


@dataclass
class ClusterConfig:
    interfaces: list[str] | None = None
    infiniband: bool = MISSING
    adapters: list[str] | None = None
    debug: str = MISSING
    heartbeat: int = MISSING
    flight_recorder: int = MISSING
    dumps: str | None = None


@dataclass
class LoggerConfig:
    name: str = MISSING
    project: str = "petra"
    mode: str = "offline"


@dataclass
class Config:
    k: int = MISSING
    dp: int = MISSING
    seed: int = MISSING
    run_dir: str | None = None
    resume: str | None = None
    init_from: str | None = None
    dry_run: bool = MISSING
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
    """Makes the form known to Hydra as ``schema``, the first entry of conf/config.yaml's defaults."""
    ConfigStore.instance().store("schema", Config)


def to_config(composed: DictConfig) -> Config:
    """A composed configuration as an object of its schema.

    Raises:
        ConfigError: a key that the schema doesn't have (Hydra lets ``+key=value`` add any), or one without a value.
    """
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(composed, resolve=True)))
    except OmegaConfBaseException as error:
        raise ConfigError(reason(error, Config)) from error
    assert isinstance(config, Config)
    require_lists(config)
    return config
