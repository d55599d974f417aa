"""Memory of each stage of a pipeline: predicted from the model's shapes, and measured during training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from petra.diagnostics.activation_memory import ActivationMemory, graph_bytes
from petra.engine.endpoints import DataSource
from petra.model import Model
from petra.pipeline import Pipeline
from petra.plan import Plan
from petra.specs import TensorSpec


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
        meters = [stack.enter_context(ActivationMemory(stage).attached(pipeline.hooks)) for stage in pipeline.stages.values()]
        pipeline.train(data, microbatches)
        return [meter.peak for meter in meters]


def buffers(model: Model, inputs: TensorSpec) -> dict[tuple[bool, bool], int]:
    """Return the bytes of all buffers of a pipeline with one block per stage: 2(J − j) copies of both streams at stage j.

    The keys are (input buffers, parameter buffers): whether every stage buffers its inputs, or only non-reversible stages; and
    whether every stage buffers its parameters.
    """
    profiles = model.profile(inputs)
    sizes = [inputs.bytes, *(sum(t.bytes for t in profile.outputs) for profile in profiles)]
    everywhere = _copies(sizes[:-1])
    needed = _copies([0 if p.reversible else size for p, size in zip(profiles, sizes, strict=False)])
    weights = _copies([4 * p.parameters for p in profiles])
    return {(x, p): (everywhere if x else needed) + (weights if p else 0) for x in (True, False) for p in (True, False)}


def table3(model: Model, inputs: TensorSpec) -> dict[tuple[bool, bool], list[int]]:
    """Return the bytes of each stage, one block per stage, with the keys of :func:`buffers` (PETRA, Table 3).

    The paper adds up model, input buffers and parameter buffers (section 4.2) and leaves the details to the authors' program: a
    stage stores its parameters, its running statistics and one input; its buffers store 2(J − j) inputs and 2(J − j) copies of the
    parameters. An input is *one* of the two streams, but both at a downsampling stage. The first stage reads its data again.
    """
    profiles = model.profile(inputs)
    found: dict[tuple[bool, bool], list[int]] = {(x, p): [] for x in (True, False) for p in (True, False)}
    for j, profile in enumerate(profiles):
        specs = (inputs,) if j == 0 else profiles[j - 1].outputs
        downsamples = not profile.reversible and 0 < j < len(profiles) - 1
        one = sum(spec.bytes for spec in (specs if downsamples else specs[:1]))
        with torch.device("meta"):
            block = model.blocks[j].build()
        parameters = sum(t.nbytes for t in block.parameters())
        statistics = sum(t.nbytes for t in block.buffers() if t.is_floating_point())
        copies = 2 * (len(profiles) - 1 - j)
        for (x, p), stages in found.items():
            buffered = copies * (one * (x or downsamples) + parameters * p)
            stages.append(parameters + statistics + one + buffered)
    return found


def _copies(sizes: Sequence[int]) -> int:
    """Return the sum of 2(J − j) copies of stage j's size over all stages."""
    return sum(2 * (len(sizes) - 1 - j) * size for j, size in enumerate(sizes))
