"""Memory of a pipeline stage by stage: predicted from the model's shapes, and measured while it trains."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from petra.ends import Stream
from petra.held import HeldMeter, graph_bytes
from petra.model import Model
from petra.pipeline import Pipeline
from petra.simulator import in_flight
from petra.streams import TensorSpec


@dataclass(frozen=True)
class StageMemory:
    """What one stage holds."""

    parameters: int
    in_flight: int
    """Microbatches at most."""
    held: int
    """Bytes between F and B, of all microbatches in flight."""


def predicted(pipeline: Pipeline, inputs: TensorSpec, autocast: torch.dtype | None = None) -> list[StageMemory]:
    """For each stage of the whole pipeline, from tensors without data.

    Stashed weights are not counted, since their number depends on where updates fall.

    Args:
        inputs: form of one microbatch of data.
        autocast: the pipeline's.
    """
    layout, found = pipeline.layout, []
    for j, blocks in enumerate(layout.stages):
        specs = (inputs,) if j == 0 else layout.profiles[blocks.start - 1].outputs
        one = graph_bytes(pipeline.model, blocks, specs, pipeline._keeps(j), autocast=autocast)
        count = in_flight(pipeline.delays[j], pipeline.k, pipeline.method.flush)
        found.append(StageMemory(sum(layout.profiles[b].parameters for b in blocks), count, count * one))
    return found


def measured(pipeline: Pipeline, stream: Stream, microbatches: int) -> list[int]:
    """For each stage of this process the most bytes held between F and B while training."""
    with ExitStack() as stack:
        meters = [stack.enter_context(HeldMeter(stage).watching()) for stage in pipeline.stages.values()]
        pipeline.train(stream, microbatches)
        return [meter.peak for meter in meters]


def buffers(model: Model, inputs: TensorSpec) -> dict[tuple[bool, bool], int]:
    """Bytes of the buffers that a pipeline with one block a stage would need, 2(J − j) copies at stage j (PETRA, Table 3).

    By (input buffers, parameter buffers): whether every stage buffers its inputs, or only those that aren't reversible; and
    whether every stage buffers its parameters.
    """
    profiles = model.profile(inputs)
    stages = len(profiles)
    sizes = [inputs.bytes, *(sum(t.bytes for t in profile.outputs) for profile in profiles)]
    found = {}
    for all_inputs in (True, False):
        for parameters in (True, False):
            each = (
                (size if all_inputs or not p.reversible else 0) + (4 * p.parameters if parameters else 0)
                for p, size in zip(profiles, sizes, strict=False)
            )
            found[all_inputs, parameters] = sum(2 * (stages - 1 - j) * one for j, one in enumerate(each))
    return found
