"""A training run: from a checked configuration to the records and the exported network."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petra.data import EvalSource, TrainSource
from petra.diagnostics.weight_drift import WeightDrift, distance
from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.engine.data_parallel import Replicas
from petra.errors import require
from petra.pipeline import Pipeline
from petra.process_memory import keep_freed_memory, release_memory
from petra.training import (
    FORMATS,
    Bar,
    Checkpoints,
    Epoch,
    Lines,
    Schedule,
    Trainer,
    UpdateLog,
    export,
    finished_epochs,
    limited,
    peak_memory,
)

from ..config.schema import MEMORY, Config
from ..runtime.network import set_variables
from ..runtime.rank import Process
from ..runtime.signals import StopRequest
from .autotune import tune_setup
from .build import Setup, set_numerics, set_up
from .diagnostics import attach_diagnostics
from .dry_run import memory_table, stage_map
from .exclusive import exclusive_folder
from .folder import Records, headline, summarise
from .report import read_updates
from .resume import Start, checkpoint_facts, find_start, load_start, require_shared, restore_choices
from .weights import FOLDER

UPDATES_BETWEEN_DRIFTS = 10
"""Updates between two measurements of the weights' drift in a run without ``trainer.log_every``."""


def run(config: Config, process: Process) -> None:
    """Train one configuration and write its records to the run's folder. Every process of the run must call this function.

    Raises:
        PetraError: If the configuration or its data cannot be used. Raised in every process.
    """
    setup = set_up(config, process)
    require(config.data.crops in (None, 1), "data.crops", "1 in training (petra evaluate accepts others)", config.data.crops)
    if config.dry_run:
        if process.first:
            print(stage_map(setup), flush=True)
            if config.dry_run == MEMORY:
                print(f"\n{memory_table(setup)}", flush=True)
        return
    notes = prepare_process(setup)
    with process.process_group(setup.device, config.trainer.timeout), exclusive_folder(config, process):
        train_in_group(setup, notes, process)


@dataclass
class Run:
    """A run that is ready to train.

    Attributes:
        setup: The setup, with the values that auto-tuning has chosen.
        folder: Folder of the run.
        records: Records of the run in the first process, None in the others.
        facts: Facts of the data, stored with exported weights.
        stop: Whether this process was asked to stop.
        started: Time at which the run was opened.
    """

    setup: Setup
    pipeline: Pipeline
    trainer: Trainer
    folder: Path
    records: Records | None
    facts: Mapping[str, Any]
    stop: StopRequest
    started: float


def train_in_group(setup: Setup, notes: Sequence[str], process: Process) -> None:
    """Train a set-up run inside its process group.

    The pipeline and all that refers to it end with this function, before the process group does: destroyed the other way round,
    groups of replicas sometimes abort the process.

    Args:
        notes: Lines to print first.
    """
    run = open_run(setup, notes, process, find_start(setup.config, process), StopRequest())
    finish_run(run, fit(run))


def open_run(
    setup: Setup,
    notes: Sequence[str],
    process: Process,
    start: Start,
    stop: StopRequest,
    replicas: Replicas | None = None,
) -> Run:
    """Load the data, build the pipeline, load what the run starts from, and open its records. Every process must call this.

    Args:
        notes: Lines to print first.
        start: What the run starts from.
        stop: Whether this process was asked to stop.
        replicas: The replicas that take part, if some may be lost; None for all.
    """
    config, started = setup.config, time.perf_counter()
    setup = tune_setup(restore_choices(setup, start), process)
    train, test = setup.data(replicas)
    preparation = None if train.preparation is None else train.preparation.as_dict()
    prepared = {"preparation": preparation, "vocabulary": train.vocabulary}
    batches = limited(train.batches_per_epoch, config.trainer.limit_batches)
    learning_rate = setup.learning_rate(batches)
    pipeline = setup.pipeline(learning_rate, replicas)
    loaded = load_start(pipeline, config, start, batches, train.vocabulary)
    records = open_records(config, start, pipeline.clock, process)
    if records is not None:
        if (total := config.trainer.epochs * batches) < config.k:
            print(f"warning: k={config.k}: the run has only {total} microbatches, so it ends before its first update")
        if (warmup := config.schedule.warmup_epochs) >= config.trainer.epochs:
            reached = f"the learning rate reaches {config.trainer.epochs / warmup:.0%} of its peak, at the end of the run"
            print(
                f"warning: schedule.warmup_epochs={warmup:g}: expected less than trainer.epochs={config.trainer.epochs}; {reached}"
            )
        print(*notes, f"{headline(setup)}; records in {records.folder}", *loaded, sep="\n", flush=True)
        records.log_changes(pipeline.clock, start.changes)
    folder = all_gather_objects(None if records is None else records.folder)[0]
    checkpoints = open_checkpoints(config, folder, process)
    data = train, test
    trainer = make_trainer(setup, pipeline, data, learning_rate, records, checkpoints, stop, prepared)
    if start.trainer is not None:
        trainer.resume(start.trainer)
    return Run(setup, pipeline, trainer, folder, records, prepared, stop, started)


def fit(run: Run) -> list[Epoch]:
    """Train a run to its last epoch. Every process must call this function."""
    config = run.setup.config.trainer
    with attach_diagnostics(config, run.pipeline, None if run.records is None else run.folder), run.stop.handle_signals():
        return run.trainer.fit(config.epochs)


def finish_run(run: Run, history: Sequence[Epoch]) -> None:
    """Export the weights and write the summary. Every process must call this function."""
    export_weights(run.pipeline, run.folder, run.setup.config, {**run.facts, "epochs": len(history)})
    memory = all_gather_objects(peak_memory(run.setup.device))
    if run.records is not None:
        seconds = time.perf_counter() - run.started
        run.records.finish(summarise(run.setup, run.pipeline.clock, history, memory, seconds), history)


def prepare_process(setup: Setup) -> list[str]:
    """Set torch's options, the allocator and the network's environment variables, and return notes to print."""
    trainer = setup.config.trainer
    set_numerics(trainer)
    release_memory(setup.device)  # of an earlier run of this process
    if setup.device.type == "cpu":
        keep_freed_memory()
    return set_variables(setup.config.cluster)


def open_records(config: Config, start: Start, clock: int, process: Process) -> Records | None:
    """Open the run's folder in the first process, and return None in the others.

    Args:
        clock: Number of microbatches that the run has trained on.

    Raises:
        PetraError: If the folder cannot be used or the checkpoint's facts are invalid. Raised in every process.
    """
    records = None
    with raise_on_all_ranks():
        rows = [] if start.trainer is None else [epoch.row() for epoch in finished_epochs(start.trainer)]
        if process.first:
            before = Path(str(config.run_dir)) if start.state is not None else start.path and start.path.parent.parent
            updates = [] if before is None else read_updates(before, clock)
            records = Records(config, rows, updates, clock)
    return records


def open_checkpoints(config: Config, folder: Path, process: Process) -> Checkpoints | None:
    """Return the writer of the run's checkpoints, or None if ``checkpoint.keep`` is 0.

    Raises:
        PetraError: If a process does not see the run's folder. Raised in every process.
    """
    checkpoint = config.checkpoint
    if not checkpoint.keep:
        return None
    require_shared(folder, config, process)
    return Checkpoints(folder / FOLDER, checkpoint.keep, background=checkpoint.background, timeout=config.trainer.timeout)


def make_trainer(
    setup: Setup,
    pipeline: Pipeline,
    data: tuple[TrainSource, EvalSource],
    learning_rate: Schedule,
    records: Records | None,
    checkpoints: Checkpoints | None,
    stop: Callable[[], bool],
    facts: Mapping[str, Any],
) -> Trainer:
    """Return the trainer of a run. It logs and displays progress only if ``records`` is not None."""
    config, progress, updates = setup.config, None, None
    drift = WeightDrift(pipeline, distance(config.k, config.trainer.log_every or UPDATES_BETWEEN_DRIFTS))
    pipeline.hooks.attach(drift)
    pipeline.measures.append(drift.metrics)
    if records is not None:
        display = Bar if sys.stdout.isatty() else Lines
        metrics = pipeline.recipe.metrics
        if config.trainer.log_every is not None:
            measure, loggers = drift.of_first_stage, records.update_loggers
            updates = UpdateLog(config.trainer.log_every, config.k, learning_rate, metrics, loggers, measure)
        progress = display(config.trainer.epochs, learning_rate.microbatches_per_epoch, learning_rate, metrics, setup.unit)
    return Trainer(
        pipeline,
        *data,
        learning_rate,
        limit=config.trainer.limit_batches,
        unit=setup.unit,
        bytes_per_target=data[1].bytes_per_target,
        every=config.checkpoint.every,
        checkpoints=checkpoints,
        facts=checkpoint_facts(setup) | dict(facts),
        stop=stop,
        loggers=() if records is None else records.loggers,
        updates=updates,
        progress=progress,
    )


def export_weights(pipeline: Pipeline, folder: Path, config: Config, facts: Mapping[str, Any]) -> None:
    """Write the trained network to the run's folder as ``trainer.export`` says, and its moving average if there is one.

    Every process must call this function.
    """
    if config.trainer.export == "none":
        return
    suffix = FORMATS[config.trainer.export]
    export(pipeline, folder / f"model{suffix}", facts)
    if config.optim.ema is not None:
        with pipeline.averaged():
            export(pipeline, folder / f"ema{suffix}", facts)
