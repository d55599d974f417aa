"""Table of the stages of a plan, which a dry run prints without building the model."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from petra.cost_model.autotune import Tuned
from petra.cost_model.block_memory import Known
from petra.cost_model.memory import PredictedMemory, predict_memory
from petra.method import Method
from petra.plan import Plan, StagePlan
from petra.plan.messages import Boundary
from petra.specs import TensorSpec

from ..config.schema import AUTO
from .build import Setup
from .markdown import aligned_table


@dataclass(frozen=True)
class StageRow:
    """One row of the table."""

    plan: Plan
    stage: StagePlan

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank that owns the stage, in each replica."""
        processes = self.plan.layout.processes
        owner = next(place for place, stages in enumerate(processes) if self.stage.index in stages)
        return tuple(range(owner, len(processes) * self.plan.layout.dp, len(processes)))

    @property
    def forward_bytes(self) -> int:
        """Size in bytes of the message to the next stage; 0 for the last stage."""
        return sum(boundary.forward_bytes for boundary in self._boundary)

    @property
    def backward_bytes(self) -> int:
        """Size in bytes of the message from the next stage; 0 for the last stage."""
        return sum(boundary.backward_bytes for boundary in self._boundary)

    @property
    def blocks(self) -> str:
        """Names of the first and the last block."""
        first, last = self.stage.profiles[0].name, self.stage.profiles[-1].name
        return first if first == last else f"{first} … {last}"

    @property
    def stores(self) -> str:
        """What the blocks store: ``nothing`` if it is the same for all, otherwise counts such as ``2 input, 3 nothing``."""
        keeps = self.stage.keeps
        if len({*keeps}) == 1:
            return str(keeps[0])
        return ", ".join(f"{n} {keep}" for keep, n in Counter(keeps).items())

    def facts(self) -> dict[str, Any]:
        """Return the row's entry in summary.json."""
        stage = self.stage
        return {
            "stage": stage.index + 1,
            "processes": list(self.ranks),
            "blocks": self.blocks,
            "parameters": stage.parameters,
            "flops": stage.flops,
            "stores": self.stores,
            "delay": stage.delay,
            "staleness": stage.staleness,
            "in_flight": stage.in_flight,
        }

    @property
    def _boundary(self) -> tuple[Boundary, ...]:
        """The boundary after the stage; empty for the last stage."""
        return self.plan.boundaries[self.stage.index :][:1]


COLUMNS: dict[str, Callable[[StageRow], str]] = {
    "stage": lambda row: str(row.stage.index + 1),
    "process": lambda row: ", ".join(map(str, row.ranks)),
    "blocks": lambda row: row.blocks,
    "parameters": lambda row: f"{row.stage.parameters:,}",
    "FLOPs": lambda row: f"{row.stage.flops / sum(stage.flops for stage in row.plan.stages):.1%}",
    "τ": lambda row: str(row.stage.delay),
    "stores": lambda row: row.stores,
    "MB →": lambda row: f"{row.forward_bytes / 1e6:.2f}",
    "MB ←": lambda row: f"{row.backward_bytes / 1e6:.2f}",
}
"""Title and content of each column."""


MEMORY_PARTS = ("weights", "gradients", "optimizer", "stored", "temporary", "workspace")
"""Columns of the table of memory: fields of :class:`petra.cost_model.memory.PredictedMemory`."""


def stage_map(setup: Setup) -> str:
    """Return a Markdown table of the stages. Sizes are of one microbatch, or of a replica's share of it."""
    plan = setup.plan
    rows = [[content(row) for content in COLUMNS.values()] for row in stage_rows(plan)]
    dp = plan.layout.dp
    replicas = "" if dp == 1 else f" per replica, {dp} replicas"
    title = (
        f"{plan.model.name} on {setup.config.data.name} by {plan.method.name} (d = {plan.method.delay}, k = {plan.k}): "
        f"{len(rows)} stages in {len(plan.layout.processes)} process(es){replicas}, {plan.parameters:,} parameters, "
        f"{dp * sum(stage.flops for stage in plan.stages) / 1e9:.3g} GFLOPs forward for a microbatch of {plan.inputs}"
    )
    return f"{title}\n\n{aligned_table(tuple(COLUMNS), rows)}"


def targets_of(setup: Setup) -> TensorSpec:
    """Return shape and type of a microbatch's targets, or of a replica's share of them."""
    shape = setup.plan.layout.inputs.shape
    forms = {"images": shape[:1], "tokens": (math.prod(shape[:2]),), "pixels": (shape[0], *shape[2:])}
    return TensorSpec(forms[setup.unit], torch.int64)


def memory_table(setup: Setup) -> str:
    """Return a Markdown table with the memory that stages and processes of a replica would reach on a GPU, in MB (10^6 bytes).

    A process with several stages has a row for each, and one for all of them, whose temporary memory is that of one step.
    Auto-tuned settings have provisional values. Takes seconds, without a GPU and without the memory that it predicts.
    """
    plan, rows = setup.plan, []
    found_memory = predict_memory(plan, setup.recipe(setup.learning_rate(microbatches_per_epoch=1)), targets_of(setup))
    for process, (stages, found) in enumerate(zip(plan.layout.processes, found_memory, strict=True)):
        if stages:
            numbers = f"{stages[0] + 1} … {stages[-1] + 1}" if len(stages) > 1 else str(stages[0] + 1)
            several = {str(j + 1): found.stages[j] for j in stages} if len(stages) > 1 else {}
            for name, memory in {**several, numbers: found}.items():
                parts = (*(getattr(memory, part) for part in MEMORY_PARTS), memory.total)
                rows.append([str(process), name, *(f"{size / 1e6:.1f}" for size in parts)])
    return aligned_table(("process", "stage", *MEMORY_PARTS, "total (MB)"), rows)


def show_progress(text: str) -> None:
    """Show what is being done, on a terminal only, in place of what was shown before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)


def stage_memories(setup: Setup, known: Known, method: Method, tuned: Tuned) -> list[PredictedMemory]:
    """Predict the memory of each chosen stage on a device of its own. Nothing is allocated.

    Args:
        known: As for :func:`petra.cost_model.memory.predict_memory`.
    """
    config = replace(setup.config, trainer=replace(setup.config.trainer, transport=AUTO))  # that of one process may be local
    several = replace(setup, config=config, processes=len(tuned.stages) * config.dp)
    chosen = several.with_choice(list(tuned.stages), method)
    return predict_memory(chosen.plan, chosen.recipe(chosen.learning_rate(1)), targets_of(chosen), known)


def stage_rows(plan: Plan) -> list[StageRow]:
    """Return a row for each stage, in order."""
    return [StageRow(plan, stage) for stage in plan.stages]
