"""Attaches the diagnostics that a configuration asks for: traces, stage metrics, reconstruction error and gradient quality."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from petra.analysis.plots import gradient_quality
from petra.analysis.timeline import write_timeline
from petra.diagnostics.gradient_quality import GradientQuality
from petra.diagnostics.reconstruction_error import ReconstructionMonitor
from petra.diagnostics.recorder import Recorder, gathered_intervals
from petra.diagnostics.stage_times import StageTimes
from petra.hooks import Hook
from petra.pipeline import Pipeline

from ..config.schema import TrainerConfig


@contextmanager
def attach_diagnostics(config: TrainerConfig, pipeline: Pipeline, folder: Path | None) -> Iterator[None]:
    """Attach the diagnostics that ``config`` enables in the body, then write their records. Every process must use this context.

    Args:
        folder: Folder of the run in the process that writes records, None in all others.
    """
    hooks: list[Hook] = []
    if config.stage_metrics:
        times = StageTimes(pipeline)
        pipeline.measures.append(times.metrics)
        hooks.append(times)
    recorder = None if config.trace is None else Recorder(pipeline, config.trace)
    if recorder is not None:
        hooks.append(recorder)
    if config.drift is not None:
        hooks.append(ReconstructionMonitor(pipeline, config.drift))
    quality = None
    if config.diagnose is not None:
        assert folder is not None
        quality = GradientQuality(pipeline, config.diagnose, folder / "gradients.jsonl")
        hooks.append(quality)
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(pipeline.hooks.attached(hook))
        yield
    if recorder is not None:
        intervals = gathered_intervals([] if pipeline.replica else recorder.intervals)
        if folder is not None and intervals:  # a resumed run may have nothing left to train
            title = f"{pipeline.plan.model.name}, {pipeline.plan.method.name}, the first {config.trace} microbatches"
            write_timeline(intervals, folder, title, pipeline.plan.layout.processes)
    if quality is not None and folder is not None and quality.rows:
        gradient_quality(quality.rows, folder / "gradients.png")
