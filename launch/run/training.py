"""A training run: from a checked configuration to the records and the exported network."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from petra.analysis.timeline import write_timeline
from petra.data.tokenizer import VOCABULARY, fingerprint, load_vocabulary
from petra.diagnostics.events import Interval
from petra.diagnostics.gradient_quality import GradientQuality
from petra.diagnostics.process_memory import keep_freed_memory, release_memory
from petra.diagnostics.reconstruction_error import ReconstructionMonitor
from petra.diagnostics.recorder import Recorder, StageTimes, gathered_intervals
from petra.diagnostics.weight_drift import WeightDrift, distance
from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.engine.options.compile import WarmUp
from petra.engine.options.replicas import Replicas
from petra.engine.options.watchdog import Watchdog
from petra.errors import DataError, Interrupted, require
from petra.hooks import Hook
from petra.training import FORMATS, Checkpoints, JsonLines, Lines, Trainer, UpdateMeans, Watcher, export, limited, peak_memory
from petra.training.checkpoint import checkpoints
from petra.training.trainer import require_an_update

from ..config.schema import MEMORY, REMEDIES, Config
from ..runtime.agent import StopRequest
from ..runtime.rank import Process
from ..runtime.reporting import TO_CONTINUE
from .build import Setup, set_numerics, set_up
from .costs import memory_table, stage_map, tune_setup
from .expected import note
from .folder import CHECKPOINTS, GRADIENTS, TRUST, as_data, gradients_in, names_foreign_code
from .page import evaluated_text, trained_text
from .records import Records, exclusive_folder, require_shared
from .resume import Start, find_start, load_start
from .text import MOST_PARAMETERS, TextSample
from .undo import RunFolder
from .weights import later_exports, network_of

UPDATES_BETWEEN_DRIFTS = 10
"""Updates between two measurements of the weights' drift with ``trainer.stage_metrics``, in a run without ``trainer.log_every``."""


def run(config: Config, process: Process, swept: Sequence[str] = ()) -> Path | None:
    """Train one configuration and write its records to the run's folder. Every process of the run must call this function.

    Args:
        swept: Overrides of a sweep, for the name of the folder if there is no ``run_dir``.

    Returns:
        The folder of the run in its first process, None in the others and after ``dry_run``.

    Raises:
        PetraError: If the configuration or its data cannot be used. Raised in every process.
    """
    setup = set_up(config, process)
    if config.dry_run:
        if process.first:
            memory = f"\n{memory_table(setup)}" if config.dry_run == MEMORY else ""
            print(f"{stage_map(setup)}{memory}", end="", flush=True)
        return None
    prepare_process(setup)
    with process.process_group(setup.device, config.trainer.timeout), exclusive_folder(config, process, swept) as folder:
        train_in_group(setup, process, folder)
    return None if folder is None else folder.path


def train_in_group(setup: Setup, process: Process, folder: RunFolder | None) -> None:
    """Train inside the process group.

    The pipeline and all that refers to it end with this function, before the process group does: destroyed the other way round,
    groups of replicas sometimes abort the process.
    """
    run = TrainingRun(setup, process, find_start(setup.config, process), StopRequest(), folder)
    run.fit()
    run.finish()


def prepare_process(setup: Setup) -> None:
    """Set torch's options and the allocator."""
    set_numerics(setup.config.trainer)
    release_memory(setup.device)  # of an earlier run of this process
    if setup.device.type == "cpu":
        keep_freed_memory()


class TrainingRun:
    """This process's part of a training run, ready to train. Every process must make the same calls.

    Args:
        setup: Configuration and plan.
        process: This process.
        start: What the run starts from.
        stop: Whether this process was asked to stop.
        folder: Folder of the run in its first process, None in the others.
        replicas: The replicas that take part, if some may be lost; None for all.
        trainer: Class of the trainer.

    Attributes:
        setup: Configuration and plan, with the values that auto-tuning has chosen.
        folder: Folder of the run.
        pipeline, trainer: The pipeline and its trainer.
        checkpoints: Writer of the run's checkpoints.
        records: Records of the run in the first process, None in the others.

    Raises:
        PetraError: If the data, the folder or what the run starts from cannot be used. Raised in every process.
    """

    def __init__(
        self,
        setup: Setup,
        process: Process,
        start: Start,
        stop: StopRequest,
        folder: RunFolder | None,
        replicas: Replicas | None = None,
        trainer: type[Trainer] = Trainer,
    ) -> None:
        self._started, self._stop, self._process = time.perf_counter(), stop, process
        self.setup = setup = tune_setup(setup, process, start.facts.get("chosen"))
        config = setup.config
        train, test = setup.data(replicas)
        facts = {"config": as_data(config), "chosen": setup.choices, "vocabulary": train.vocabulary, "contents": train.contents}
        facts["network"] = network_of(config)
        facts["preparation"] = None if train.preparation is None else asdict(train.preparation)
        limit = config.trainer.limit_batches
        batches = limited(train.batches_per_epoch, limit)
        require_an_update(config.k, config.trainer.epochs * batches, setup.recipe(batches).extensions)
        self.pipeline = setup.pipeline(batches, replicas)
        loaded = load_start(self.pipeline, config, start, batches, train.vocabulary)
        same = start.facts.get("contents") in (None, train.contents)
        require(same, "data.root", f"the training data of {start.path}", "others", DataError)
        masked, own = config.model.options.get("delimiter"), train.delimiter
        require(None in (masked, own) or masked == own, "model.delimiter", f"null or {own}, as in corpus.json", masked)
        with raise_on_all_ranks():
            tested = limited(test.batches, limit), test.batches
            self.records = None if folder is None else Records(setup, start, evaluated_text(config, *tested), folder.path)
        self.folder: Path = all_gather_objects(None if self.records is None else self.records.folder)[0]
        if self.records is not None:
            if folder is not None and start.path is not None:
                folder.stale = later_exports(folder.path, start.clock)
                loaded += [f"{path} is removed when training begins: it has a later microbatch" for path in folder.stale]
            print(
                *_warnings(setup, batches, train.vocabulary), *note(setup), self.records.headline(), *loaded, sep="\n", flush=True
            )
        if config.checkpoint.keep:
            require_shared(self.folder / CHECKPOINTS, config.trainer.timeout, process)
        self.checkpoints = Checkpoints(
            self.folder / CHECKPOINTS,
            config.checkpoint.keep,
            every=config.checkpoint.every,
            facts=facts,
            background=True,
            timeout=config.trainer.timeout,
        )
        readable = config.data.name == "text" or (setup.unit == "tokens" and train.vocabulary is not None)
        if config.trainer.sample is not None and readable and setup.plan.parameters <= MOST_PARAMETERS:
            self.pipeline.measures.append(TextSample(self.pipeline, config, config.trainer.sample, train.vocabulary))
        self._run_folder, self._intervals = folder, list[Interval]()
        watchers = self._watchers(batches)
        self.trainer = trainer(self.pipeline, train, test, limit=limit, checkpoints=self.checkpoints, watchers=watchers, stop=stop)
        if start.path is not None:
            self.trainer.resume(start.facts["trainer"])

    def fit(self) -> None:
        """Train to the last epoch."""
        with self._hinting(), self._diagnostics(), self._stop.handle_signals():
            self.trainer.fit(self.setup.config.trainer.epochs)

    @contextmanager
    def _hinting(self) -> Iterator[None]:
        """Add how to continue to errors of the body, if there is a checkpoint."""
        try:
            yield
        except Interrupted as stopped:
            stopped.hint = f"{TO_CONTINUE}{self._resume_command()}" if stopped.saved else "it can't be resumed"
            raise
        except Exception as error:
            self.checkpoints.settle(1.0)
            if checkpoints(self.folder / CHECKPOINTS):
                error.add_note(f"{TO_CONTINUE}{self._resume_command()}")
            raise

    def finish(self) -> None:
        """Write the summary, then all that needs more than the numbers: the exported weights, timeline and report."""
        with self._hinting():
            self._finish()

    def _finish(self) -> None:
        config, plan, history = self.setup.config, self.pipeline.plan, self.trainer.history
        if self._run_folder is not None:
            self._run_folder.begun = True
        memory = all_gather_objects(peak_memory(self.setup.device))
        with raise_on_all_ranks():
            if self.records is not None:
                self.records.summarize(history, memory)
        if config.trainer.export != "none":
            suffix, facts = FORMATS[config.trainer.export], {**self.checkpoints.facts, "epochs": len(history)}
            export(self.pipeline, self.folder / f"model{suffix}", facts)
            if config.optim.rules.average is not None:
                with self.pipeline.averaged():
                    export(self.pipeline, self.folder / f"ema{suffix}", facts)
        if self.records is not None:
            if self._intervals:  # a resumed run may have nothing left to train
                title = f"{plan.model.name}, {plan.method.name}, the first {config.trainer.trace} microbatches"
                write_timeline(self._intervals, self.folder, title, plan.layout.processes)
            self.records.close(time.perf_counter() - self._started)

    def _resume_command(self) -> str:
        """Return the command that continues the run on this machine, or the words that make the same command continue it."""
        config, processes = self.setup.config, self.setup.config.dp * len(self.pipeline.plan.layout.processes)
        if processes > self._process.local_world and not config.cluster.elastic:
            return f"the same command on each machine with run_dir={self.folder} resume=auto"
        flags = [*(["--nproc", str(processes)] if processes > 1 else []), *([TRUST] if names_foreign_code(config) else [])]
        return shlex.join(["petra", "resume", str(self.folder), *flags])

    def _watchers(self, batches: int) -> list[Watcher]:
        """Return the observers of the trainer: none without records."""
        config, pipeline = self.setup.config, self.pipeline
        if self.records is None:
            return []
        assert self._run_folder is not None
        found: list[Watcher] = [self._run_folder, *self.records.loggers]
        if config.trainer.log_every is not None:
            found.append(UpdateMeans(config.trainer.log_every, config.k, pipeline.recipe, self.records.update_loggers))
        trained, evaluated = trained_text(config), self.records.evaluated
        lines = partial(Lines, trained=trained, evaluated=evaluated, bar=sys.stdout.isatty())
        return [*found, lines(config.trainer.epochs, batches, pipeline.recipe, self.setup.unit)]

    @contextmanager
    def _diagnostics(self) -> Iterator[None]:
        """Attach the hooks of a run in the body.

        Every run has a watchdog and the warning about reconstruction errors; other hooks are those that the configuration asks for.
        """
        config, pipeline, plan = self.setup.config.trainer, self.pipeline, self.pipeline.plan
        times = drift = None
        if config.stage_metrics:
            times, drift = StageTimes(pipeline), WeightDrift(pipeline, distance(plan.k, config.log_every or UPDATES_BETWEEN_DRIFTS))
            pipeline.measures += [times.metrics, drift.metrics]
        recorder = None if config.trace is None else Recorder(pipeline, config.trace)
        quality = None
        if config.diagnose is not None:
            log = JsonLines(self.folder / GRADIENTS, gradients_in(self.folder, pipeline.microbatches_done)).log
            quality = GradientQuality(pipeline, config.diagnose, log)
        quiet = 1 if config.compile is None else 2 * len(plan.stages) + 2  # the neighbours' blocks are compiled in the first rounds
        watchdog = Watchdog(pipeline.workers, pipeline.rank, config.watchdog, quiet=quiet, timeout=config.timeout)
        warm_up = None if config.compile is None else WarmUp(plan, pipeline.stages, pipeline.device)
        hooks: tuple[Hook | None, ...] = (times, drift, recorder, ReconstructionMonitor(pipeline), quality, warm_up, watchdog)
        with ExitStack() as stack:
            for hook in filter(None, hooks):
                stack.enter_context(pipeline.hooks.attached(hook))
            yield
        if recorder is not None:
            self._intervals = gathered_intervals([] if pipeline.replica else recorder.intervals)


def _warnings(setup: Setup, batches: int, vocabulary: str | None) -> Iterator[str]:
    """Yield warnings about a run of ``batches`` microbatches in an epoch, with tokens of a vocabulary or bytes."""
    config = setup.config
    file = Path(config.model.options.get("path") or "", VOCABULARY)
    known = config.model.name == "huggingface" and file.is_file() and (vocabulary or config.data.name == "text")
    if known and vocabulary != fingerprint(load_vocabulary(file)):
        yield f"warning: data.root: expected tokens of {file} (petra tokenize --vocabulary {file.parent}), got others"
    if (warmup := config.schedule.options.get("warmup_epochs", 0)) >= config.trainer.epochs:
        reached = f"the learning rate reaches {config.trainer.epochs / warmup:.0%} of its peak, at the end of the run"
        yield f"warning: schedule.warmup_epochs={warmup:g}: expected less than trainer.epochs={config.trainer.epochs}; {reached}"
    if missed := [n for n in config.schedule.options.get("milestones", ()) if n >= config.trainer.epochs]:
        expected = f"expected less than trainer.epochs={config.trainer.epochs}"
        yield f"warning: schedule.milestones={missed}: {expected}; they are never reached"
    trainer, outer, formats = config.trainer, setup.outer, dict[str, str | None]()
    if len(setup.plan.stages) == 1:
        formats = {"trainer.message_format": trainer.message_format, "trainer.gradient_format": trainer.gradient_format}
    if config.dp == 1:
        formats["outer.format"] = outer.format
    for key, name in formats.items():
        if name is not None:
            yield f"warning: {key}: expected null, since this run sends nothing in it, got {name}"
    updates = trainer.epochs * batches // config.k
    if outer.every and (left := (updates - outer.overlap) % outer.every):
        which = f"the last {left} of {updates} updates" + " of stage 1" * outer.staggered
        yield f"warning: outer.every={outer.every}: {which} come after the last outer step, so the trained weights leave them out"
    late, remedy = any(stage.staleness for stage in setup.plan.stages), config.remedy
    if not late and remedy.name != "none" and remedy._target_ == REMEDIES:
        method = f"method={setup.plan.method.name}"
        yield f"warning: remedy: expected none with {method}, whose gradients are exact; {remedy.name} changes nothing"
