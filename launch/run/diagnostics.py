"""What a run is asked to watch of itself: traces, metrics of stages, gradient quality."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from launch.config.schema import TrainerConfig
from petra.analysis.plots import gradient_quality
from petra.analysis.timeline import write_timeline
from petra.diagnostics.gradient_quality import GradientDiagnosis
from petra.diagnostics.reconstruction_error import DriftWatch
from petra.diagnostics.recorder import Recorder, StageTimes, gathered_intervals
from petra.pipeline import Pipeline


@contextmanager
def watching(config: TrainerConfig, pipeline: Pipeline, folder: Path | None) -> Iterator[None]:
    """Watches the training inside as ``config`` says; every process of the pipeline makes the call.

    Args:
        folder: of the run, in the process that keeps the records.
    """
    with ExitStack() as stack:
        if config.stage_metrics:
            metrics = StageTimes(pipeline)
            pipeline.measures.append(metrics.metrics)
            stack.enter_context(metrics.attached())
        trace = None if config.trace is None else Recorder(pipeline, config.trace)
        if trace is not None:
            stack.enter_context(trace.attached())
        if config.drift is not None:
            stack.enter_context(DriftWatch(pipeline, config.drift).watching())
        diagnosis = None
        if config.diagnose is not None:
            assert folder is not None
            diagnosis = GradientDiagnosis(pipeline, config.diagnose, folder / "gradients.jsonl")
            stack.enter_context(diagnosis.watching())
        yield
    if trace is not None:
        intervals = gathered_intervals([] if pipeline.replica else trace.intervals)
        if folder is not None:
            title = f"{pipeline.plan.model.name}, {pipeline.plan.method.name}, the first {config.trace} microbatches"
            write_timeline(intervals, folder, title)
    if diagnosis is not None and folder is not None:
        gradient_quality(diagnosis.rows, folder / "gradients.png")
