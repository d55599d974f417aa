"""Memory of each stage of a pipeline: predicted from the model's shapes, and measured during training."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from petra.diagnostics.activation_memory import ActivationMemory, graph_bytes
from petra.engine.endpoints import DataSource
from petra.pipeline import Pipeline
from petra.plan import Plan


@dataclass(frozen=True)
class StageMemory:
    """Memory of one stage.

    Attributes:
        parameters: Number of parameters.
        in_flight: Largest number of microbatches between forward and backward.
        stored: Bytes stored for all microbatches in flight.
    """

    parameters: int
    in_flight: int
    stored: int


def predicted(plan: Plan) -> list[StageMemory]:
    """Return the memory of each stage of a plan, computed with fake tensors.

    Stashed weights are not counted: their number depends on which microbatches complete an update.
    """
    found = []
    for stage in plan.stages:
        one = graph_bytes(plan.model, stage.blocks, stage.inputs, stage.keeps, autocast=plan.numerics.autocast)
        found.append(StageMemory(stage.parameters, stage.in_flight, stage.in_flight * one))
    return found


def measured(pipeline: Pipeline, data: DataSource, microbatches: int) -> list[int]:
    """Train, and return for each stage of this process the largest number of bytes stored between forward and backward."""
    with ExitStack() as stack:
        meters = [stack.enter_context(ActivationMemory(j, stage).attached(pipeline.hooks)) for j, stage in pipeline.stages.items()]
        pipeline.train(data, microbatches)
        return [meter.peak for meter in meters]
