"""Trains a model: ``python -m launch.train ...`` in one process, ``torchrun --nproc-per-node N -m launch.train ...`` in N."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from launch.config.compose import compose
from launch.config.schema import Config, to_config
from launch.run.autotune import tuned
from launch.run.build import set_up
from launch.run.diagnostics import attach_diagnostics
from launch.run.dry_run import stage_map
from launch.run.folder import Records, headline, summarise
from launch.run.resume import FOLDER, as_before, begin, facts, find_start, require_shared
from launch.runtime.network import apply
from launch.runtime.rank import Place
from launch.runtime.signals import Stopping
from petra.distributed import gathered, together
from petra.pipeline import Pipeline
from petra.process_memory import keep_freed_memory
from petra.training import FORMATS, Bar, Checkpoints, Lines, Trainer, export, limited, peak_memory


def main() -> None:
    """Entry point: the command line is Hydra's."""
    place = Place.from_environment()
    torch.set_num_interop_threads(1)
    with place.reporting():
        with place.composing():
            configs = compose()
        for config in configs:
            run(to_config(config), place)


def run(config: Config, place: Place) -> None:
    """Trains one configuration in this process and all others of its group, and leaves the records in the run's folder.

    Raises:
        PetraError: the configuration or its data can't be used; the same in every process.
    """
    checked = set_up(config, place)
    if config.dry_run:
        if place.first:
            print(stage_map(checked), flush=True)
        return
    torch.set_num_threads(config.trainer.threads)
    if checked.device.type == "cpu":
        keep_freed_memory()
    notes = apply(config.cluster)
    with place.joined(checked.device, config.trainer.timeout):
        started = time.perf_counter()
        stopping = Stopping()
        start = find_start(config, place)
        checked = tuned(as_before(checked, start), place)
        train, test = checked.data()
        limit = config.trainer.limit_batches
        microbatches = limited(train.batches_per_epoch, limit)
        learning_rate = checked.learning_rate(microbatches)
        pipeline = checked.pipeline(learning_rate)
        trainer = Trainer(pipeline, train, test, learning_rate, limit=limit, unit=checked.unit)
        trainer.every, trainer.stop = config.checkpoint.every, stopping
        begin(pipeline, config, start)
        if start.trainer is not None:
            trainer.resume(start.trainer)
        with together():
            records = Records(config, [epoch.row() for epoch in trainer.history]) if place.first else None
        progress = None
        if records is not None:
            print(*notes, sep="\n", end="\n" if notes else "")
            print(f"{headline(checked, pipeline)}; records in {records.folder}", flush=True)
            display = Bar if sys.stdout.isatty() else Lines
            progress = display(config.trainer.epochs, microbatches, learning_rate, tuple(pipeline.recipe.metrics), checked.unit)
            if start.path is not None:
                print(f"goes on from {start.path}, after microbatch {pipeline.clock}", flush=True)
            trainer.loggers, trainer.progress = records.loggers, progress
        folder = gathered(None if records is None else records.folder)[0]
        if config.checkpoint.keep:
            require_shared(folder, config, place)
            checkpoint, timeout = config.checkpoint, config.trainer.timeout
            trainer.checkpoints = Checkpoints(folder / FOLDER, checkpoint.keep, background=checkpoint.background, timeout=timeout)
            trainer.facts = facts(checked)
        with attach_diagnostics(config.trainer, pipeline, None if records is None else records.folder), stopping.listening():
            history = trainer.fit(config.trainer.epochs)
        if config.trainer.export != "none":
            write_weights(pipeline, folder, config)
        memory = gathered(peak_memory(checked.device))
        if records is not None:
            records.finish(summarise(checked, pipeline, history, memory, time.perf_counter() - started), history)


def write_weights(pipeline: Pipeline, folder: Path, config: Config) -> None:
    """Leaves the trained network in the run's folder, and its moving average beside it; every process takes part."""
    suffix = FORMATS[config.trainer.export]
    export(pipeline, folder / f"model{suffix}")
    if config.optim.ema is not None:
        with pipeline.averaged():
            export(pipeline, folder / f"ema{suffix}")


if __name__ == "__main__":
    main()
