"""Checks of a configuration that need several keys or the number of processes."""

from __future__ import annotations

from petra.errors import alternatives, require
from petra.inplace_abn import PIXEL_DATASETS
from petra.plan.layout import processes_per_replica
from petra.training import FORMATS
from petra.training.weight_files import check_format

from ..config.schema import AUTO, Config
from ..runtime.rank import Process
from .targets import imported


def check(config: Config, process: Process) -> None:
    """Check combinations of keys, and keys that depend on the number of processes.

    Raises:
        ConfigError: If a value is not accepted. The message names the key.
    """
    trainer, alone, automatic = config.trainer, process.world == 1, AUTO in (config.trainer.stages, config.method.keep)
    located = config.resume != AUTO or config.run_dir is not None
    require(located, "resume", "auto only with run_dir=<the run's folder>", AUTO)
    require(config.resume_change is None or config.resume is not None, "resume_change", "null without resume", config.resume_change)
    require(config.init_skip is None or config.init_from is not None, "init_skip", "null without init_from", config.init_skip)
    single = config.init_from is None or config.resume in (None, AUTO)
    require(single, "init_from", "null with resume=<folder>, which brings its own weights", config.init_from)
    check_installed = getattr(imported("logger._target_", config.logger._target_), "require", None)
    if check_installed is not None:
        check_installed()
    if trainer.export != "none":
        check_format(FORMATS[trainer.export])
    transports = ("auto", "local") if processes_per_replica(process.world, config.dp) == 1 else ("auto", "lockstep", "edge")
    require(trainer.transport in transports, "trainer.transport", alternatives(transports), trainer.transport)
    got = f"{trainer.diagnose} in {process.world} processes"
    require(trainer.diagnose is None or alone, "trainer.diagnose", "null, or one process", got)
    memory = trainer.memory_limit
    fits = memory is None or (memory > 0 and automatic)
    require(fits, "trainer.memory_limit", "null, or a number > 0 with trainer.stages=auto or method.keep=auto", memory)
    fits = not (config.method.options.get("fill") and config.method.delay == AUTO)
    require(fits, "method.delay", "an integer >= 0 with method.fill=true", AUTO)
    if config.cluster.elastic:
        _check_elastic(config, process)
    selects = trainer.bootstrap is None or config.data.name in PIXEL_DATASETS
    require(selects, "trainer.bootstrap", f"null with data={config.data.name}, which has no pixels", trainer.bootstrap)
    optimizer, rules = config.optim.options, config.optim.rules
    momentum = not optimizer.get("nesterov") or optimizer.get("momentum") != 0
    require(momentum, "optim.nesterov", "false with optim.momentum=0", True)
    scaled = rules["loss_scale"] is None or trainer.precision == "fp16"
    require(scaled, "optim.loss_scale", f"null with trainer.precision={trainer.precision}", rules["loss_scale"])
    exact = not trainer.exact_streams or trainer.wire == "float32"
    require(exact, "trainer.exact_streams", f"false with trainer.wire={trainer.wire}", "true")


def _check_elastic(config: Config, process: Process) -> None:
    """Check that a run can lose replicas."""
    require(config.dp > 1, "cluster.elastic", "false without replicas (dp > 1)", "true")
    require(config.checkpoint.every is not None, "checkpoint.every", "an integer >= 1 with cluster.elastic=true", "null")
    require(
        config.run_dir is not None and config.resume == AUTO, "cluster.elastic", "false without run_dir and resume=auto", "true"
    )
    require(process.device(config.trainer.device).type == "cpu", "cluster.elastic", "false on GPUs", "true")
    require(not config.trainer.exact_streams, "trainer.exact_streams", "false with cluster.elastic=true", "true")
    automatic = AUTO in (config.trainer.stages, config.method.keep, config.method.delay)
    require(not automatic, "cluster.elastic", "false with automatic settings", "true")
