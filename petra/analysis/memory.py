"""Memory of a pipeline stage by stage: predicted from the model's shapes, and measured while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from petra.diagnostics.activation_memory import HeldMeter, graph_bytes
from petra.engine.endpoints import Stream
from petra.model import Model
from petra.pipeline import Pipeline
from petra.plan.schedule import in_flight
from petra.specs import TensorSpec


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
    """Bytes of the buffers that a pipeline with one block a stage would need: 2(J − j) copies, both streams, at stage j.

    By (input buffers, parameter buffers): whether every stage buffers its inputs, or only those that aren't reversible; and
    whether every stage buffers its parameters.
    """
    profiles = model.profile(inputs)
    sizes = [inputs.bytes, *(sum(t.bytes for t in profile.outputs) for profile in profiles)]
    everywhere = _copies(sizes[:-1])
    needed = _copies([0 if p.reversible else size for p, size in zip(profiles, sizes, strict=False)])
    weights = _copies([4 * p.parameters for p in profiles])
    return {(x, p): (everywhere if x else needed) + (weights if p else 0) for x in (True, False) for p in (True, False)}


def table3(model: Model, inputs: TensorSpec) -> dict[tuple[bool, bool], list[int]]:
    """PETRA's Tables 3 and 6: bytes of each stage, one block each, by (input buffers, parameter buffers), as :func:`buffers`.

    The paper adds up model, input buffers and parameter buffers (section 4.2) and leaves the rest to the authors' program: a stage
    has its parameters, its running statistics and one input; its buffers have 2(J − j) inputs and 2(J − j) times the parameters. An
    input is *one* of the two streams, but both at a downsampling stage; the first stage can read its data again.
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
            held = copies * (one * (x or downsamples) + parameters * p)
            stages.append(parameters + statistics + one + held)
    return found


def _copies(sizes: Sequence[int]) -> int:
    """2(J − j) copies of what stage j has of a size."""
    return sum(2 * (len(sizes) - 1 - j) * size for j, size in enumerate(sizes))
