"""Memory of a pipeline stage by stage: predicted from the model's shapes, and measured while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from petra.ends import Stream
from petra.held import HeldMeter, graph_bytes
from petra.model import Model
from petra.pipeline import Pipeline
from petra.profiling import count_blocks
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


def table3(model: Model, inputs: TensorSpec) -> dict[tuple[bool, bool], int]:
    """PETRA's Table 3: total bytes by (input buffers, parameter buffers), as :func:`buffers` has them.

    The paper doesn't say what exactly it counts. This reading was found by trying several, and gives all of its figures: the graph
    of every block once; 2(J − j) copies of *one* stream of each stage's input, but without input buffers none for reversible stages
    and for the first, which can read its data again; 2(J − j) copies of the parameters and running statistics.
    """
    profiles, blocks = model.profile(inputs), count_blocks(model, inputs)
    graphs = sum(block.graph_bytes for block in blocks)
    stream = [inputs.bytes, *(profile.outputs[0].bytes for profile in profiles[:-1])]
    needed = _copies([0 if j == 0 or p.reversible else size for j, (p, size) in enumerate(zip(profiles, stream, strict=True))])
    everywhere = _copies(stream)
    with torch.device("meta"):
        states = [spec.build().state_dict().values() for spec in model.blocks]
    weights = _copies([sum(t.nbytes for t in state) for state in states])
    return {(x, p): graphs + (everywhere if x else needed) + (weights if p else 0) for x in (True, False) for p in (True, False)}


def _copies(sizes: Sequence[int]) -> int:
    """2(J − j) copies of what stage j has of a size."""
    return sum(2 * (len(sizes) - 1 - j) * size for j, size in enumerate(sizes))
