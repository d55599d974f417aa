"""Choice of how a process runs its steps, by the settings of its runtime."""

from __future__ import annotations

import torch

from petra.engine.steps import InThreads, Overlapped, StepRunner, compute_threads, require_concurrency
from petra.engine.streams import StreamSteps
from petra.errors import require
from petra.method import Keep, Split
from petra.plan import Plan
from petra.plan.overlap import overlapped_stages, require_overlap
from petra.plan.schedule import Op
from petra.settings import Runtime


def check_runtime(plan: Plan, runtime: Runtime, device: torch.device) -> None:
    """Check that the plan and the device allow the settings of a runtime. Makes the same decision on every rank.

    Raises:
        ConfigError: If they don't.
    """
    require_concurrency(runtime.concurrency, plan.layout.dp * len(plan.layout.processes), device)
    gpu = device.type == "cuda"
    require(
        gpu or not runtime.stage_streams,
        "trainer.stage_streams",
        "false on the CPU (see trainer.concurrency)",
        runtime.stage_streams,
    )
    split = plan.method.split
    for name, used in (("trainer.overlap", runtime.overlap), ("trainer.cuda_graphs", runtime.cuda_graphs)):
        require(not used or split is Split.NONE, "method.split", f"none with {name}", split)
    if runtime.cuda_graphs:
        require(gpu, "trainer.cuda_graphs", "false on the CPU", "auto")
        require(not plan.numerics.exact_streams, "trainer.exact_streams", "false with trainer.cuda_graphs", True)
        require(runtime.compile is None, "trainer.compile", "null with trainer.cuda_graphs", runtime.compile)
    if runtime.overlap:
        require_overlap(plan.boundary_delays)
        require(not plan.refetches, "data.refetch", "false with trainer.overlap", True)
        if gpu:
            expected = "input or nothing with trainer.overlap on a GPU, at a stage whose next boundary has d >= 2"
            require(bool(_overlapped(plan, device)), "method.keep", expected, "graph")
        require(not plan.numerics.exact_streams, "trainer.exact_streams", "false with trainer.overlap", True)
        require(gpu or runtime.compile is None, "trainer.compile", "null with trainer.overlap on the CPU", runtime.compile)


def step_runner(plan: Plan, runtime: Runtime, device: torch.device, process: int) -> StepRunner | None:
    """Return what runs the steps of a process; None if they run in turn.

    Args:
        process: Number of the process in its replica.

    Raises:
        ConfigError: If the plan and the device don't allow the settings (:func:`check_runtime`).
    """
    check_runtime(plan, runtime, device)
    stages = plan.layout.processes[process]
    overlapped = [j for j in _overlapped(plan, device) if j in stages] if runtime.overlap else []
    if device.type == "cuda":
        several = overlapped or runtime.stage_streams
        return StreamSteps(stages, overlapped, runtime.stage_streams, len(plan.stages) - 1, device) if several else None
    runner: StepRunner | None = None
    if runtime.concurrency > 1:
        # The longest steps of a round start first, so that threads finish at about the same time.
        runner = InThreads(
            compute_threads(runtime.concurrency, "stage"),
            lambda step: plan.stages[step.worker.index].flops * (1 if step.op is Op.FORWARD else 3),
        )
    return Overlapped(overlapped, compute_threads(runtime.concurrency, "backward"), runner) if overlapped else runner


def _overlapped(plan: Plan, device: torch.device) -> list[int]:
    """Return the stages that run forward beside backward on a device (:mod:`petra.engine.streams`)."""
    stages = overlapped_stages(plan.boundary_delays)
    return [j for j in stages if device.type == "cpu" or Keep.GRAPH not in plan.stages[j].keeps]
