"""Choice of how a process runs its steps, by the settings of its runtime."""

from __future__ import annotations

import torch

from petra.engine.steps import InThreads, InTurn, Overlapped, StepRunner, compute_threads, require_concurrency
from petra.engine.streams import StreamSteps
from petra.errors import require
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
    require(gpu or not runtime.stage_streams, "stage_streams", "false on the CPU (see concurrency)", runtime.stage_streams)
    if runtime.overlap:
        require_overlap(plan.boundary_delays)
        require(not plan.numerics.exact_streams, "exact_streams", "false with overlap", True)
        require(gpu or runtime.compile is None, "compile", "null with overlap on the CPU", runtime.compile)


def step_runner(plan: Plan, runtime: Runtime, device: torch.device, process: int) -> StepRunner:
    """Return what runs the steps of a process.

    Args:
        process: Number of the process in its replica.
    """
    stages = plan.layout.processes[process]
    overlapped = [j for j in overlapped_stages(plan.boundary_delays) if j in stages] if runtime.overlap else []
    if device.type == "cuda":
        return StreamSteps(stages, overlapped, runtime.stage_streams, device) if overlapped or runtime.stage_streams else InTurn()
    runner: StepRunner = InTurn()
    if runtime.concurrency > 1:
        # The longest steps of a round start first, so that threads finish at about the same time.
        runner = InThreads(
            compute_threads(runtime.concurrency, "stage"),
            lambda step: plan.stages[step.worker.index].flops * (1 if step.op is Op.FORWARD else 3),
        )
    return Overlapped(overlapped, compute_threads(runtime.concurrency, "backward"), runner) if overlapped else runner
