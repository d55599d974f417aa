"""The schema of a configuration: type, default and check of each key, and what it means.

Keys of what ``_target_`` names (model, data set, optimizer, schedule, logger) are the parameters of its signature. Checks that need
several keys, the data, or the number of processes are made where these come together, in ``launch/run``. This room imports no
torch, so that a command reports an invalid value at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from omegaconf import MISSING

from petra.errors import FRACTION, POSITIVE, SAME_RESULTS, Check, integer, is_integer, number, one_of
from petra.method import STORABLE, Weights

from .checks import as_list
from .targets import is_shipped, parameters

AUTO = "auto"
MEMORY = "memory"
"""Value of ``dry_run`` that also predicts memory."""
FORMATS = ("pt", "safetensors")
"""Keys of ``petra.training.FORMATS``."""
PRECISIONS = {"float32": None, "bf16": "bfloat16", "fp16": "float16"}
"""Names in torch of the types of ``trainer.precision``; None leaves tensors as they are."""
WIRES = ("float32", "bf16")
"""Those of them that messages between stages can have, for ``trainer.wire``."""
COMPILERS = (
    *("eager", "aot_eager", "inductor"),
    *("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
)
"""Backends of ``torch.compile``, and modes of its backend inductor."""
LONGEST_TIMEOUT = 10**7
"""Seconds. torch refuses much longer timeouts."""

DELAY = Check(
    lambda value: value == AUTO or all(is_integer(d) and d >= 0 for d in as_list(value)),
    "an integer >= 0, a list with one for each boundary, or auto",
)
DRY_RUN = Check(lambda value: value in (False, True, MEMORY), f"true, false or {MEMORY}")
KEEP = Check(
    lambda value: value == AUTO or all(keep in STORABLE for keep in as_list(value)),
    "graph, input, nothing, a list with one of these for each block, or auto",
)
NAMES = Check(lambda names: bool(names) and all(names), "a list of names")
REFETCH = Check(lambda value: value in (AUTO, True, False), "true, false or auto")
STAGES = Check(
    lambda value: value in (None, AUTO) or (as_list(value) != [] and all(is_integer(n) and n >= 1 for n in as_list(value))),
    "null, an integer >= 1, auto, or a list with the number of blocks in each stage",
)


@dataclass
class Section:
    """A group of keys for what ``_target_`` names. The section of a configuration has a field for each parameter of the target too.

    Attributes:
        _target_: Function or class: of petra, or your own as module.function.
    """

    GIVEN: ClassVar[tuple[str, ...]] = ()
    """Parameters of a target that are no keys, because they depend on the rest of the run."""
    MEANINGS: ClassVar[dict[str, str]] = {}
    """Descriptions of the fields that :func:`with_parameters` has added."""

    _target_: str = MISSING

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the value of a parameter of the target."""

    @property
    def name(self) -> str:
        """Name of a function or class in petra; the whole ``_target_`` for another one."""
        return self._target_.rpartition(".")[2] if is_shipped(self._target_) else self._target_

    def options(self) -> dict[str, Any]:
        """Return the keys that are parameters of the target."""
        if is_shipped(self._target_):
            names = [name for name in parameters(self._target_) if name not in self.GIVEN]
        else:
            general = {entry.name for base in SECTIONS.values() if isinstance(self, base) for entry in fields(base)}
            names = [entry.name for entry in fields(self) if entry.name not in general]
        return {name: getattr(self, name) for name in names}


def with_parameters(target: str) -> Callable[[type[Section]], type[Section]]:
    """Return a decorator that adds the parameters of a dataclass in petra to the fields of a section, with their defaults."""

    def add(kind: type[Section]) -> type[Section]:
        for name, entry in parameters(target).items():
            kind.__annotations__[name] = entry.annotation
            setattr(kind, name, entry.default)
        kind.MEANINGS = {name: entry.meaning for name, entry in parameters(target).items()}
        return kind

    return add


@dataclass
class ModelConfig(Section):
    """The model."""

    GIVEN = ("classes", "size")


@dataclass
class DataConfig(Section):
    """The data set, and how it is read.

    Attributes:
        batch_size: Images, crops, or windows of tokens in a microbatch.
        augment: Crop, flip or shift training samples at random.
        classes: Number of classes. Most data sets fix it.
        size: Height and width of an image in pixels, or tokens per window. Some data sets fix it.
        workers: Processes that prepare or decode inputs in advance, and as many for labels of pixels; 0: the first stage's process.
        refetch: true: read the first stage's inputs again in the backward pass instead of storing them; auto: if they are in
            memory.
    """

    batch_size: Annotated[int, integer(1, 10**6)] = 64
    augment: bool = True
    classes: Annotated[int, integer(1, 10**7)] = 10
    size: Annotated[int, integer(1, 10**6)] = 32
    workers: Annotated[int, integer(0, 1000), SAME_RESULTS] = 0
    refetch: Annotated[Any, REFETCH, SAME_RESULTS] = AUTO


@dataclass
class MethodConfig:
    """The training method, see :class:`petra.method.Method`.

    Attributes:
        name: Name in records; the switches below define the method.
        delay: Boundary delay d: difference in delay between a stage and the next, in microbatches; an integer >= 0, a list with one
            per boundary, or auto: the smallest that cost no throughput.
        keep: What a block stores between forward and backward: graph; input (recompute); nothing (reconstruct; non-reversible
            blocks store their input); a list with one per block; or auto: the graph where trainer.memory_limit allows.
        weights: Weights that the backward pass differentiates: current, stashed (those of the forward pass), or double (two
            versions, used by both passes).
        flush: Drain the pipeline before each update; gradients are then exact.
        fill: With flush: run all k forward passes of an update before its first backward pass.
        max_updates: Largest number of updates of a stage between the forward and the backward pass of a microbatch, >= 1: k must be
            at least the first stage's delay divided by it; null: no limit.
    """

    name: str = MISSING
    delay: Annotated[Any, DELAY] = MISSING
    keep: Annotated[Any, KEEP] = MISSING
    weights: Annotated[str, one_of(tuple(Weights))] = "current"
    flush: bool = False
    fill: bool = False
    max_updates: int | None = None


@dataclass
class RemedyConfig(Section):
    """Remedies for staleness: a function or class that makes them.

    Attributes:
        name: Name in records.
        discount: Epochs over which a stage's learning rate rises from lr / s to lr, where s is its staleness in updates; 0: off.
    """

    name: str = "none"
    discount: Annotated[float, number(least=0)] = 0.0


RULES = "petra.engine.update_rules.UpdateRules"


@dataclass
@with_parameters(RULES)
class OptimConfig(Section):
    """The optimizer, its learning rate, and the rules of an update (:class:`petra.engine.update_rules.UpdateRules`).

    Attributes:
        lr: Peak learning rate, after warm-up.
        scaling: goyal (Goyal et al. 2017): lr is for 256 samples per update, and the learning rate is lr * batch_size * k / 256;
            none: the learning rate is lr.
    """

    GIVEN = ("module",)

    lr: Annotated[float, number(least=0)] = 1e-3
    scaling: Annotated[str, one_of(("goyal", "none"))] = "none"


@dataclass
class ScheduleConfig(Section):
    """The learning rate schedule."""

    GIVEN = ("peak", "microbatches_per_epoch", "epochs")


@dataclass
class TrainerConfig:
    """Length of the run, stages, numerics, the runtime, and diagnostics.

    Attributes:
        epochs: Passes over the training data, each followed by an evaluation.
        stages: Number of stages; null: one per block; a list: the number of blocks in each stage; auto: one per process, balanced
            by measured time.
        transport: auto; local (one process); lockstep or edge (several processes); on GPUs, auto selects lockstep, and edge can
            hang.
        precision: Type of convolutions and matrix products: float32, bf16 or fp16; streams stay in float32.
        exact_streams: Round both terms of the sums in reversible blocks, so that the sums are exact; with unchanged weights,
            reconstruction is then exact bit for bit.
        wire: Type of streams and gradients between stages: float32, or bf16, which halves messages and rounds streams.
        label_smoothing: Label smoothing of the training loss.
        bootstrap: null: the training loss is a mean over all pixels; or the fraction of the pixels of each image with the highest
            losses that count, such as 0.25 (online bootstrapping).
        channels_last: Use the channels-last memory format for images and weights.
        matmul_precision: Matrix products and convolutions of float32 on GPUs: highest (float32), high (TF32 or three bf16 products)
            or medium (bf16), both with TF32 in convolutions; torch.set_float32_matmul_precision.
        cudnn_benchmark: true: measure cuDNN's algorithms for each new shape and use the fastest; two runs may then choose
            differently, so they are not equal bit for bit; false: only deterministic algorithms.
        compile: Compiler of the functions inside blocks: a backend of torch.compile (inductor, aot_eager or eager) or a mode of
            inductor (default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs); null: don't compile.
        limit_batches: Maximum number of microbatches per epoch and per evaluation, for short tests; null: no limit.
        export: Format of the exported weights: none; pt: model.pt in the run folder; safetensors: model.safetensors (pip install -e
            '.[safetensors]'); with optim.average also ema.*.
        threads: Compute threads per process; results are equal bit for bit only for the same number of threads.
        concurrency: Stages that run at the same time in one process on the CPU, each in its own thread with trainer.threads compute
            threads.
        overlap: On the CPU: run the forward of one microbatch beside the backward of another, in a second thread, at stages whose
            next boundary has a delay d >= 2; results stay equal bit for bit.
        device: auto (CUDA if there is a GPU), cpu or cuda.
        timeout: Seconds that a process waits for another before the run ends with an error.
        memory_limit: Memory limit of a stage in GB (10^9 bytes), for trainer.stages=auto and method.keep=auto; null: no limit.
        log_every: Updates between two rows of updates.jsonl: means of training loss and metrics, also sent to the logger; null:
            only numbers per epoch.
        trace: Number of microbatches to record from the start, in trace.json (Perfetto, chrome://tracing), timeline.png and
            timeline.svg; null: none.
        stage_metrics: Log for each stage the time of forwards, backwards, updates and waiting, microbatches in flight, staleness
            and buffer bytes.
        drift: Warn once per stage if a reconstructed input differs from the true one by more than this fraction of its norm; null:
            don't check.
        diagnose: Compare gradients every this many microbatches (one process only), in gradients.jsonl and gradients.png; null:
            never.
    """

    epochs: Annotated[int, integer(1), SAME_RESULTS] = 300
    stages: Annotated[Any, STAGES, SAME_RESULTS] = None
    transport: Annotated[str, one_of((AUTO, "local", "lockstep", "edge")), SAME_RESULTS] = AUTO
    precision: Annotated[str, one_of(PRECISIONS)] = "float32"
    exact_streams: bool = False
    wire: Annotated[str, one_of(WIRES)] = "float32"
    label_smoothing: Annotated[float, FRACTION] = 0.0
    bootstrap: Annotated[float | None, number(above=0, most=1)] = None
    channels_last: Annotated[bool, SAME_RESULTS] = True
    matmul_precision: Annotated[str, one_of(("highest", "high", "medium")), SAME_RESULTS] = "highest"
    cudnn_benchmark: Annotated[bool, SAME_RESULTS] = False
    compile: Annotated[str | None, one_of(COMPILERS), SAME_RESULTS] = None
    limit_batches: Annotated[int | None, integer(1)] = None
    export: Annotated[str, one_of(("none", *FORMATS)), SAME_RESULTS] = "none"
    threads: Annotated[int, integer(1, 1000), SAME_RESULTS] = 1
    concurrency: Annotated[int, integer(1, 1000), SAME_RESULTS] = 1
    overlap: Annotated[bool, SAME_RESULTS] = False
    device: Annotated[str, one_of((AUTO, "cpu", "cuda")), SAME_RESULTS] = AUTO
    timeout: Annotated[float, number(above=0, most=LONGEST_TIMEOUT), SAME_RESULTS] = 600.0
    memory_limit: Annotated[float | None, POSITIVE, SAME_RESULTS] = None
    log_every: Annotated[int | None, integer(1), SAME_RESULTS] = 10
    trace: Annotated[int | None, integer(1), SAME_RESULTS] = None
    stage_metrics: Annotated[bool, SAME_RESULTS] = False
    drift: Annotated[float | None, POSITIVE, SAME_RESULTS] = 0.5
    diagnose: Annotated[int | None, integer(1), SAME_RESULTS] = None


@dataclass
class CheckpointConfig:
    """When checkpoints are written, and how many are kept: in checkpoints/ in the run folder, which all processes must share.

    Attributes:
        every: Write a checkpoint every so many microbatches too, counted from the start of the run; each checkpoint drains the
            pipeline, and a signal to stop takes effect at the next one; null: after each epoch only.
        keep: Number of newest checkpoints to keep, in addition to the best by test accuracy (by test loss if there is no accuracy);
            0: write none.
        background: Write from a copy in memory while training continues; an error ends the run at its next drain.
    """

    every: Annotated[int | None, integer(1)] = None
    keep: Annotated[int, integer(0)] = 2
    background: bool = True


@dataclass
class ClusterConfig:
    """Settings of NCCL and gloo, see :func:`launch.runtime.network.variables`. Variables that are already set are kept.

    Attributes:
        machines: File with speed, memory and links of the devices of a pipeline, for automatic settings; petra doctor writes it;
            null: equal devices, and the link between the first two processes.
        interfaces: Network interfaces to use, such as [eth0]; null: chosen by NCCL and gloo (NCCL_SOCKET_IFNAME,
            GLOO_SOCKET_IFNAME).
        env: Further environment variables, such as {NCCL_DEBUG: INFO}.
        elastic: true: with dp > 1, continue when a replica is lost, and take it back at a later drain; needs checkpoint.every and
            gloo; petra train --nproc starts one torchrun agent for each replica.
    """

    machines: str | None = None
    interfaces: Annotated[list[str] | None, NAMES] = None
    env: dict[str, str] = field(default_factory=dict)
    elastic: bool = False


@dataclass
class LoggerConfig(Section):
    """Where metrics are logged besides metrics.jsonl."""

    GIVEN = ("path", "folder", "config", "rows", "microbatches")

    _target_: str = "petra.training.JsonLines"


@dataclass
class Config:
    """A whole run.

    Attributes:
        k: Microbatches per update of a stage, >= 1; their gradients are averaged.
        dp: Number of replicas of every stage, each in its own processes and with an equal share of every microbatch.
        seed: Seed of the weights, the order of the data, augmentation and random numbers inside blocks.
        run_dir: Folder of the run, new or empty; null: runs/<date>_<time>_<model>_<method>_<data>.
        resume: null: don't resume; auto: resume from the last checkpoint in run_dir, or start if there is none; or the folder of a
            run or a checkpoint.
        resume_change: null: a resumed run must have the same results-relevant settings; or the list of keys that it may change,
            such as [optim.lr].
        init_from: Initial weights: null: random; or a file of exported weights, the folder of a checkpoint, or the folder of a run
            (the weights that petra evaluate takes).
        init_skip: null: init_from sets all blocks; or the list of blocks that keep random weights, such as [head].
        dry_run: true: print the stages and what they store, without training; memory: also predict the memory of each process on a
            GPU.
    """

    k: Annotated[int, integer(1)] = 4
    dp: Annotated[int, SAME_RESULTS] = 1
    seed: Annotated[int, integer(0)] = 0
    run_dir: Annotated[str | None, SAME_RESULTS] = None
    resume: Annotated[str | None, SAME_RESULTS] = None
    resume_change: Annotated[list[str] | None, NAMES, SAME_RESULTS] = None
    init_from: Annotated[str | None, SAME_RESULTS] = None
    init_skip: Annotated[list[str] | None, NAMES, SAME_RESULTS] = None
    dry_run: Annotated[Any, DRY_RUN, SAME_RESULTS] = False
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    remedy: RemedyConfig = field(default_factory=RemedyConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: Annotated[CheckpointConfig, SAME_RESULTS] = field(default_factory=CheckpointConfig)
    cluster: Annotated[ClusterConfig, SAME_RESULTS] = field(default_factory=ClusterConfig)
    logger: Annotated[LoggerConfig, SAME_RESULTS] = field(default_factory=LoggerConfig)


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "remedy": RemedyConfig,
    "optim": OptimConfig,
    "schedule": ScheduleConfig,
    "logger": LoggerConfig,
}
"""Groups of keys with a ``_target_``."""
