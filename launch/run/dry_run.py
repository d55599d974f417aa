"""Tables of the stages of a plan and of their memory, which a dry run prints without building the model."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from petra.cost_model.autotune import Tuned
from petra.cost_model.block_memory import Known
from petra.cost_model.memory import PredictedMemory, predict_memory
from petra.method import Method
from petra.plan import Plan
from petra.specs import TensorSpec

from ..config.schema import AUTO
from .build import Setup
from .markdown import table

STAGES = ("stage", "process", "blocks", "parameters", "FLOPs", "τ", "stores", "MB →", "MB ←")
MEMORY_PARTS = ("weights", "gradients", "optimizer", "stored", "temporary", "workspace")
"""Columns of the table of memory: fields of :class:`petra.cost_model.memory.PredictedMemory`."""


def stage_facts(plan: Plan) -> list[dict[str, Any]]:
    """Return the entry of each stage in summary.json. FLOPs and bytes are of one microbatch, or of a replica's share of it."""
    processes, found = plan.layout.processes, []
    messages = [*((boundary.forward_bytes, boundary.backward_bytes) for boundary in plan.boundaries), (0, 0)]
    for stage, (forward, backward) in zip(plan.stages, messages, strict=True):
        owner = next(process for process, stages in enumerate(processes) if stage.index in stages)
        names, keeps = [profile.name for profile in stage.profiles], Counter(map(str, stage.keeps))
        found.append(
            {
                "stage": stage.index + 1,
                "processes": [*range(owner, len(processes) * plan.layout.dp, len(processes))],
                "blocks": names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}",
                "parameters": stage.parameters,
                "flops": stage.flops,
                "stores": ", ".join(f"{count} {keep}" if len(keeps) > 1 else keep for keep, count in keeps.items()),
                "delay": stage.delay,
                "staleness": stage.staleness,
                "in_flight": stage.in_flight,
                "forward_bytes": forward,
                "backward_bytes": backward,
            }
        )
    return found


def stage_map(setup: Setup) -> str:
    """Return a Markdown table of the stages. Sizes are of one microbatch, or of a replica's share of it."""
    plan, dp, stages = setup.plan, setup.plan.layout.dp, stage_facts(setup.plan)
    flops = sum(stage["flops"] for stage in stages)
    rows = [
        [
            *(str(stage["stage"]), ", ".join(map(str, stage["processes"])), stage["blocks"], f"{stage['parameters']:,}"),
            *(f"{stage['flops'] / flops:.1%}", str(stage["delay"]), stage["stores"]),
            *(f"{stage[size] / 1e6:.2f}" for size in ("forward_bytes", "backward_bytes")),
        ]
        for stage in stages
    ]
    title = (
        f"{plan.model.name} on {setup.config.data.name} by {plan.method.name} (d = {plan.method.delay}, k = {plan.k}): "
        f"{len(rows)} stages in {len(plan.layout.processes)} process(es){f' per replica, {dp} replicas' if dp > 1 else ''}, "
        f"{plan.parameters:,} parameters, {dp * flops / 1e9:.3g} GFLOPs forward for a microbatch of {plan.inputs}"
    )
    return f"{title}\n\n{table(STAGES, rows, aligned=True)}"


def memory_table(setup: Setup) -> str:
    """Return a Markdown table with the memory that stages and processes of a replica would reach on a GPU, in MB (10^6 bytes).

    A process with several stages has a row for each, and one for all of them, whose temporary memory is that of one step.
    Auto-tuned settings have provisional values. Takes seconds, without a GPU and without the memory that it predicts.
    """
    rows = []
    for process, (stages, found) in enumerate(zip(setup.plan.layout.processes, _memory(setup, {}), strict=True)):
        shown = {str(j + 1): found.stages[j] for j in stages} if len(stages) > 1 else {}
        if stages:
            shown[str(stages[0] + 1) if len(stages) == 1 else f"{stages[0] + 1} … {stages[-1] + 1}"] = found
        for name, memory in shown.items():
            sizes = (*(getattr(memory, part) for part in MEMORY_PARTS), memory.total)
            rows.append([str(process), name, *(f"{size / 1e6:.1f}" for size in sizes)])
    return table(("process", "stage", *MEMORY_PARTS, "total (MB)"), rows, aligned=True)


def stage_memories(setup: Setup, known: Known, method: Method, tuned: Tuned) -> list[PredictedMemory]:
    """Predict the memory of each stage of a method with a chosen partition and delay, on a device of its own. Nothing is allocated.

    Args:
        known: As for :func:`petra.cost_model.memory.predict_memory`.
    """
    config = replace(setup.config, trainer=replace(setup.config.trainer, transport=AUTO))  # that of one process may be local
    several = replace(setup, config=config, processes=len(tuned.stages) * config.dp)
    return _memory(several.with_choice(list(tuned.stages), replace(method, delay=tuned.delay)), known)


def _memory(setup: Setup, known: Known) -> list[PredictedMemory]:
    """Predict the memory of each process of a replica."""
    shape = setup.plan.layout.inputs.shape
    forms = {"images": shape[:1], "tokens": (math.prod(shape[:2]),), "pixels": (shape[0], *shape[2:])}
    return predict_memory(setup.plan, setup.recipe(), TensorSpec(forms[setup.unit], torch.int64), known)


def show_progress(text: str) -> None:
    """Show what is being done, on a terminal only, in place of what was shown before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)
