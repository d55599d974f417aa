"""Choice of how a process runs its steps, by the settings of its runtime."""

from __future__ import annotations

import torch

from petra.engine.steps import InThreads, Overlapped, StepRunner, compute_threads, require_concurrency
from petra.errors import require
from petra.plan import Plan
from petra.plan.overlap import overlapped_stages, require_overlap
from petra.plan.timetable import Op
from petra.settings import Runtime


def check_runtime(plan: Plan, runtime: Runtime, device: torch.device) -> None:
    """Check that the plan and the device allow the settings of a runtime. Makes the same decision on every rank.

    Raises:
        ConfigError: If they don't.
    """
    require_concurrency(runtime.concurrency, plan.layout.dp * len(plan.layout.processes), device)
    if runtime.overlap:
        require(device.type == "cpu", "trainer.overlap", "false on a GPU", True)
        require_overlap(plan.boundary_delays)
        require(not plan.refetches, "data.refetch", "false with trainer.overlap", True)
        require(not plan.numerics.exact_streams, "trainer.exact_streams", "false with trainer.overlap", True)
        require(runtime.compile is None, "trainer.compile", "null with trainer.overlap", runtime.compile)


def step_runner(plan: Plan, runtime: Runtime, device: torch.device, process: int) -> StepRunner | None:
    """Return what runs the steps of a process; None if they run in turn.

    Args:
        process: Number of the process in its replica.

    Raises:
        ConfigError: If the plan and the device don't allow the settings (:func:`check_runtime`).
    """
    check_runtime(plan, runtime, device)
    stages = plan.layout.processes[process]
    overlapped = [j for j in overlapped_stages(plan.boundary_delays) if j in stages] if runtime.overlap else []
    runner: StepRunner | None = None
    if runtime.concurrency > 1:
        # The longest steps of a round start first, so that threads finish at about the same time.
        runner = InThreads(
            compute_threads(runtime.concurrency, "stage"),
            lambda step: plan.stages[step.worker.index].flops * (1 if step.op is Op.FORWARD else 3),
        )
    return Overlapped(overlapped, compute_threads(runtime.concurrency, "backward"), runner) if overlapped else runner
