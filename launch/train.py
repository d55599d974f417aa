"""Trains a model: ``python -m launch.train ...`` in one process, ``torchrun --nproc-per-node N -m launch.train ...`` in N."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from launch.config.compose import compose
from launch.config.schema import Config, to_config
from launch.run.autotune import tuned
from launch.run.build import Setup, set_up
from launch.run.diagnostics import attach_diagnostics
from launch.run.dry_run import stage_map
from launch.run.folder import Records, headline, summarise
from launch.run.resume import FOLDER, Start, as_before, begin, facts, find_start, require_shared
from launch.runtime.network import apply
from launch.runtime.rank import Place
from launch.runtime.signals import Stopping
from petra.data import EvalStream, TrainStream
from petra.distributed import gathered, together
from petra.pipeline import Pipeline
from petra.process_memory import keep_freed_memory
from petra.training import FORMATS, Bar, Checkpoints, Lines, Schedule, Trainer, export, finished_epochs, limited, peak_memory


def main() -> None:
    """Entry point. Hydra parses the command line."""
    place = Place.from_environment()
    torch.set_num_interop_threads(1)
    with place.reporting():
        with place.composing():
            configs = compose()
        for config in configs:
            run(to_config(config), place)


def run(config: Config, place: Place) -> None:
    """Train one configuration in this process and all others of its group, and write the records to the run's folder.

    Raises:
        PetraError: In every process, if the configuration or its data cannot be used.
    """
    setup = set_up(config, place)
    if config.dry_run:
        if place.first:
            print(stage_map(setup), flush=True)
        return
    notes = prepare_process(setup)
    with place.joined(setup.device, config.trainer.timeout):
        started = time.perf_counter()
        start = find_start(config, place)
        setup = tuned(as_before(setup, start), place)
        train, test = setup.data()
        learning_rate = setup.learning_rate(limited(train.batches_per_epoch, config.trainer.limit_batches))
        pipeline = setup.pipeline(learning_rate)
        begin(pipeline, config, start)
        records = open_records(config, start, place)
        if records is not None:
            print(*notes, f"{headline(setup, pipeline)}; records in {records.folder}", sep="\n", flush=True)
            if start.path is not None:
                print(f"resuming from {start.path}, after microbatch {pipeline.clock}", flush=True)
        folder = gathered(None if records is None else records.folder)[0]
        checkpoints = open_checkpoints(config, folder, place)
        stop = Stopping()
        trainer = make_trainer(setup, pipeline, (train, test), learning_rate, records, checkpoints, stop)
        if start.trainer is not None:
            trainer.resume(start.trainer)
        with attach_diagnostics(config.trainer, pipeline, None if records is None else records.folder), stop.listening():
            history = trainer.fit(config.trainer.epochs)
        export_weights(pipeline, folder, config)
        memory = gathered(peak_memory(setup.device))
        if records is not None:
            records.finish(summarise(setup, pipeline, history, memory, time.perf_counter() - started), history)


def prepare_process(setup: Setup) -> list[str]:
    """Set the number of threads, the allocator and the network's environment variables, and return notes to print."""
    torch.set_num_threads(setup.config.trainer.threads)
    if setup.device.type == "cpu":
        keep_freed_memory()
    return apply(setup.config.cluster)


def open_records(config: Config, start: Start, place: Place) -> Records | None:
    """Open the run's folder in the first process, and return None in the others.

    Raises:
        PetraError: In every process, if the folder cannot be used or the checkpoint's facts are invalid.
    """
    records = None
    with together():
        rows = [] if start.trainer is None else [epoch.row() for epoch in finished_epochs(start.trainer)]
        if place.first:
            records = Records(config, rows)
    return records


def open_checkpoints(config: Config, folder: Path, place: Place) -> Checkpoints | None:
    """Return the writer of the run's checkpoints, or None if ``checkpoint.keep`` is 0.

    Raises:
        PetraError: In every process, if any does not see the run's folder.
    """
    checkpoint = config.checkpoint
    if not checkpoint.keep:
        return None
    require_shared(folder, config, place)
    return Checkpoints(folder / FOLDER, checkpoint.keep, background=checkpoint.background, timeout=config.trainer.timeout)


def make_trainer(
    setup: Setup,
    pipeline: Pipeline,
    data: tuple[TrainStream, EvalStream],
    learning_rate: Schedule,
    records: Records | None,
    checkpoints: Checkpoints | None,
    stop: Callable[[], bool],
) -> Trainer:
    """Return the trainer of a configuration. Without records, it logs and displays nothing."""
    config, progress = setup.config, None
    if records is not None:
        display = Bar if sys.stdout.isatty() else Lines
        metrics = tuple(pipeline.recipe.metrics)
        progress = display(config.trainer.epochs, learning_rate.microbatches_per_epoch, learning_rate, metrics, setup.unit)
    return Trainer(
        pipeline,
        *data,
        learning_rate,
        limit=config.trainer.limit_batches,
        unit=setup.unit,
        every=config.checkpoint.every,
        checkpoints=checkpoints,
        facts=facts(setup),
        stop=stop,
        loggers=() if records is None else records.loggers,
        progress=progress,
    )


def export_weights(pipeline: Pipeline, folder: Path, config: Config) -> None:
    """Write the trained network to the run's folder as ``trainer.export`` says, and its moving average if there is one.

    All processes must call this function.
    """
    if config.trainer.export == "none":
        return
    suffix = FORMATS[config.trainer.export]
    export(pipeline, folder / f"model{suffix}")
    if config.optim.ema is not None:
        with pipeline.averaged():
            export(pipeline, folder / f"ema{suffix}")


if __name__ == "__main__":
    main()
