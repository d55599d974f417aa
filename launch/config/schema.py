"""The schema of a configuration: type, default and bounds of each key, and what it means.

Keys of what ``_target_`` names (model, data set, method, optimizer, ...) are the parameters of its signature. Checks that need
several keys, the data, or the number of processes are made where these come together, in ``launch/run``. This room imports no
torch, so that a command reports an invalid value at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, get_type_hints

from petra.errors import Count, Share
from petra.message_formats import FEW_BITS, MESSAGE_FORMATS
from petra.update_rules import UpdateRules

from .keys import Key, fields_of, is_shipped, signature

AUTO: Final = "auto"
METHOD = "petra.method.Method"
REMEDIES = "petra.staleness.remedies"
MEMORY = "memory"
"""Value of ``dry_run`` that also predicts memory."""
Compiler = Literal["eager", "aot_eager", "inductor", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""Backends of ``torch.compile``, then modes of its backend inductor."""
RENAMED = {"trainer.streams": "trainer.message_format=bf16 or int8, or trainer.exact_streams=true"}
"""Former keys, with what to set instead."""
GIVEN = {
    *("classes", "size", "module", "peak", "microbatches_per_epoch", "epochs"),
    *("logger.path", "folder", "config", "rows", "microbatches"),
}
"""Parameters of targets, or those of one group, that are no keys, because they depend on the rest of the run."""


@dataclass(kw_only=True)
class Section:
    """A group of keys for what ``_target_`` names: its fields, and each parameter of the target.

    Attributes:
        _target_: Function or class: of petra, or your own as module.function.
        options: Values of the parameters of the target.
    """

    _target_: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of a function or class in petra; the whole ``_target_`` for another one."""
        return self._target_.rpartition(".")[2] if is_shipped(self._target_) else self._target_


@dataclass(kw_only=True)
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

    batch_size: Annotated[int, ">= 1 and <= 1000000"] = 64
    augment: bool = True
    classes: Annotated[int, ">= 1 and <= 10000000"] = 10
    size: Annotated[int, ">= 1 and <= 1000000"] = 32
    workers: Annotated[int, ">= 0 and <= 1000", "same results"] = 0
    refetch: Annotated[bool | Literal["auto"], "same results"] = "auto"


@dataclass(kw_only=True)
class MethodConfig(Section):
    """The training method.

    Attributes:
        name: Name in records; the other keys define the method.
        delay: Boundary delay d: difference in delay between a stage and the next, in microbatches; a list has one per boundary;
            auto: the smallest that cost no throughput.
        keep: What a block stores between forward and backward: graph; input (recompute); nothing (reconstruct; non-reversible
            blocks store their input); a list has one per block; auto: for each block graph, input or nothing, so that the slowest
            stage is as fast as possible within trainer.memory_limit.
    """

    _target_: str = METHOD
    name: str = ""
    delay: Annotated[int | list[int] | Literal["auto"], ">= 0"] = 2
    keep: Literal["graph", "input", "nothing", "auto"] | list[Literal["graph", "input", "nothing"]] = "nothing"


@dataclass(kw_only=True)
class RemedyConfig(Section):
    """Remedies for staleness: a function or class that makes them.

    Attributes:
        discount: Epochs over which a stage's learning rate rises from lr / s to lr, where s is its staleness in updates; 0: off.
    """

    discount: Annotated[float, ">= 0"] = 0.0

    @property
    def name(self) -> str:
        """Name in records: the keys with other values than their defaults, after the target if it is not petra's."""
        known, own = keys("remedy", self._target_), {"discount": self.discount, **self.options}
        for name in own.keys() & known.keys():
            if type(own[name]) is int and type(known[name].default) is float:
                own[name] = float(own[name])  # feedback=1 is feedback=1.0
        changed = [f"{name}={value}" for name, value in own.items() if name not in known or value != known[name].default]
        return ", ".join([*([] if self._target_ == REMEDIES else [self._target_]), *changed]) or "none"


@dataclass(kw_only=True)
class OptimConfig(Section):
    """The optimizer, its learning rate, and the rules of an update.

    Attributes:
        lr: Peak learning rate, after warm-up.
        scaling: goyal (Goyal et al. 2017): lr is for 256 samples per update, and the learning rate is lr * batch_size * k / 256;
            none: the learning rate is lr.
        rules: The rules; their fields are keys of this group.
    """

    rules: UpdateRules
    lr: Annotated[float, ">= 0"] = 1e-3
    scaling: Literal["goyal", "none"] = "none"


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
        exact_streams: Round terms of sums in reversible blocks, so that, with unchanged weights, reconstruction is exact bit for
            bit.
        message_format: Format in which stages send streams: null: their own type; bf16: streams and gradients in bf16; int8, int4
            and float8: elements of few bits forward, with a scale for each tensor, or, with token, for each token; stochastic:
            rounded at random.
        gradient_format: Format in which stages send gradients; reconstructed streams then travel back as message_format. null: both
            as message_format if it is bf16, otherwise in their own type.
        stored_format: Format in which all blocks but the first store their inputs for backward; null: their own type.
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
        device: auto (CUDA if there is a GPU), cpu or cuda.
        timeout: Seconds that a process waits for another before the run ends with an error.
        watchdog: Seconds without progress after which a process that trains reports where it waits.
        memory_limit: Memory limit of a stage in GB (10^9 bytes), for trainer.stages=auto and method.keep=auto, whose results it
            changes; null: no limit, or with method.keep=auto the free memory of the GPU less 10 %.
        log_every: Updates between two rows of updates.jsonl: means of training loss and metrics, also sent to the logger; null:
            only numbers per epoch.
        sample: Tokens of the text that a language model writes after each epoch, on the console and in the records; null: none. The
            largest networks, which would not fit the memory of the first process, write none.
        trace: Number of microbatches to record from the start, in trace.json (Perfetto, chrome://tracing), timeline.png and
            timeline.svg; null: none.
        stage_metrics: Log for each stage the time of forwards, backwards, updates and waiting, microbatches in flight, staleness,
            drift of weights and buffer bytes.
        diagnose: Compare gradients every this many microbatches (one process only), in gradients.jsonl and the report; null:
            never.
    """

    epochs: Annotated[int, ">= 1", "same results"] = 300
    stages: Annotated[int | list[int] | Literal["auto"] | None, ">= 1", "same results"] = None
    transport: Annotated[Literal["auto", "local", "lockstep", "edge"], "same results"] = "auto"
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    exact_streams: bool = False
    message_format: Literal[*MESSAGE_FORMATS, *FEW_BITS] | None = None  # type: ignore[valid-type]
    gradient_format: Literal[*MESSAGE_FORMATS, *FEW_BITS] | None = None  # type: ignore[valid-type]
    stored_format: Literal["bf16", "int8", "int8_token"] | None = None
    label_smoothing: Share = 0.0
    bootstrap: Annotated[float | None, "> 0 and <= 1"] = None
    channels_last: Annotated[bool, "same results"] = True
    matmul_precision: Annotated[Literal["highest", "high", "medium"], "same results"] = "highest"
    cudnn_benchmark: Annotated[bool, "same results"] = False
    compile: Annotated[Compiler | None, "same results"] = None
    limit_batches: Annotated[int | None, ">= 1"] = None
    export: Annotated[Literal["none", "pt", "safetensors"], "same results"] = "none"
    device: Annotated[Literal["auto", "cpu", "cuda"], "same results"] = "auto"
    timeout: Annotated[float, "> 0 and <= 2000000", "same results"] = 600.0
    watchdog: Annotated[float, "> 0 and <= 2000000", "same results"] = 60.0
    memory_limit: Annotated[float | None, "> 0", "same results"] = None
    log_every: Annotated[int | None, ">= 1", "same results"] = 10
    sample: Annotated[int | None, ">= 1 and <= 10000", "same results"] = 60
    trace: Annotated[int | None, ">= 1", "same results"] = None
    stage_metrics: Annotated[bool, "same results"] = False
    diagnose: Annotated[int | None, ">= 1", "same results"] = None


@dataclass
class CheckpointConfig:
    """When checkpoints are written, and how many are kept: in checkpoints/ in the run folder, which all processes must share.

    They are written from a copy in memory while training continues. An error ends the run at its next drain.

    Attributes:
        every: Write a checkpoint every so many microbatches too, counted from the start of the run; each checkpoint drains the
            pipeline, and a signal to stop takes effect at the next one; null: after each epoch only.
        keep: Number of newest checkpoints to keep, in addition to the best by test accuracy (by test loss if there is no accuracy);
            0: write none.
    """

    every: Annotated[int | None, ">= 1"] = None
    keep: Annotated[int, ">= 0"] = 2


@dataclass
class ClusterConfig:
    """The machines of a run.

    Attributes:
        machines: File with speed, memory and links of the devices of a pipeline, for automatic settings; petra doctor writes it;
            null: equal devices, and the link between the first two processes.
        elastic: true: with dp > 1, continue when a replica is lost, and take it back at a later drain; needs checkpoint.every and
            gloo; petra train --nproc starts one torchrun agent for each replica.
    """

    machines: Annotated[str | None, "path"] = None
    elastic: bool = False


@dataclass(kw_only=True)
class Config:
    """A whole run.

    Attributes:
        k: Microbatches per update of a stage, >= 1; their gradients are averaged. Each microbatch counts alike, however many of its
            targets are not ignored: the update is a mean of means, while the loss that is reported is a mean over targets.
        dp: Number of replicas of every stage, each in its own processes and with an equal share of every microbatch.
        seed: Seed of the weights, the order of the data, augmentation and random numbers inside blocks.
        run_dir: Folder of the run, new or empty; null: runs/<date>_<time>_<model>_<method>_<data>.
        resume: null: don't resume; auto: resume from the last checkpoint in run_dir, or start if there is none.
        resume_change: null: a resumed run must have the same results-relevant settings; or the list of keys that it may change,
            such as [optim.lr].
        init_from: Initial weights: null: random; or a file of exported weights, the folder of a checkpoint, or the folder of a run
            (the weights that petra evaluate takes).
        init_skip: null: init_from sets all blocks; or the list of blocks that keep random weights, such as [head].
        dry_run: true: print the stages and what they store, without training; memory: also predict the memory of each process on a
            GPU.
    """

    k: Count = 4
    dp: Annotated[int, ">= 1", "same results"] = 1
    seed: Annotated[int, ">= 0"] = 0
    run_dir: Annotated[str | None, "same results", "path"] = None
    resume: Annotated[Literal["auto"] | None, "same results"] = None
    resume_change: Annotated[list[str] | None, "same results"] = None
    init_from: Annotated[str | None, "same results", "path"] = None
    init_skip: Annotated[list[str] | None, "same results"] = None
    dry_run: Annotated[bool | Literal["memory"], "same results"] = False
    model: Section
    data: DataConfig
    method: MethodConfig
    remedy: RemedyConfig
    optim: OptimConfig
    outer: Section
    schedule: Section
    trainer: TrainerConfig
    checkpoint: Annotated[CheckpointConfig, "same results"]
    cluster: Annotated[ClusterConfig, "same results"]
    logger: Annotated[Section, "same results"]


GROUPS: dict[str, Any] = {name: kind for name, kind in get_type_hints(Config).items() if is_dataclass(kind)}
"""Groups of keys."""
SECTIONS: dict[str, type[Section]] = {name: kind for name, kind in GROUPS.items() if issubclass(kind, Section)}
"""Those with a ``_target_``."""


@cache
def keys(group: str = "", target: str = "") -> dict[str, Key]:
    """Return the keys of a group by name, or those of the top level that are no groups.

    Args:
        group: The group, or nothing.
        target: ``_target_`` of a section. It sets the defaults of keys that the section has for any target.
    """
    kind = GROUPS.get(group, Config)
    found = {name: key for name, key in fields_of(kind).items() if name not in (*GROUPS, "options", "rules")}
    parameters = signature(target) if group and is_shipped(target) else {}
    for name, key in {**parameters, **(fields_of(UpdateRules) if group == "optim" else {})}.items():
        if name in found:
            found[name].default = key.default
        elif not {name, f"{group}.{name}"} & GIVEN:
            found[name] = key
    return found
