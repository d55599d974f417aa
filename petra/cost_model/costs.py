"""Costs of blocks, measured or counted in FLOPs, and of the stages made of them: seconds and bytes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from petra.cost_model.machines import synchronized_time
from petra.engine.build import make_stage
from petra.engine.recipe import OptimizerFactory
from petra.engine.stage import Stage
from petra.method import Keep
from petra.model import BlockProfile, Model
from petra.plan.messages import Boundary, boundary
from petra.settings import Numerics
from petra.specs import Streams, TensorSpec, without_side

TIMES = ("forward", "backward", "graph_forward", "graph_backward", "update", "weights")
"""Attributes of a :class:`BlockCost` that are times, in the order in which they are measured."""
CACHE_BYTES = 1 << 26
"""Memory beyond which writing to more of it hardly changes what the caches still contain."""


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block for one microbatch. Times are in seconds, or in any other unit if all blocks use the same.

    Attributes:
        boundaries: Messages over the boundary after the block, if a stage ends there, by what the block stores.
        forward, backward: Times with ``keep=nothing`` (``keep=input`` for blocks that aren't reversible).
        graph_forward, graph_backward: Times with ``keep=graph``.
        update: Time of one update of the block's parameters.
        weights: Part of either backward that computes the gradients of the parameters.
        trained: Whether the block has trained parameters.
    """

    name: str
    reversible: bool
    boundaries: Mapping[Keep, Boundary]
    forward: float
    backward: float
    graph_forward: float
    graph_backward: float
    update: float = 0.0
    weights: float = 0.0
    trained: bool = field(default=True, kw_only=True)

    def seconds(self, keep: Keep) -> tuple[float, float]:
        """Return the times of forward and backward."""
        return (self.graph_forward, self.graph_backward) if keep is Keep.GRAPH else (self.forward, self.backward)

    def scaled(self, factor: float) -> BlockCost:
        """Return the cost with all times multiplied by a factor."""
        return replace(self, **{name: factor * getattr(self, name) for name in TIMES})


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage for one microbatch.

    Attributes:
        forward, backward: Seconds; backward includes recomputation.
        update: Seconds of one update.
        forward_bytes, backward_bytes: Sizes of the messages to the next and to the previous stage.
        weights: Part of ``backward`` that computes the gradients of the parameters.
    """

    forward: float
    backward: float
    update: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    weights: float = 0.0

    def on(self, speed: float) -> StageCost:
        """Return the cost on a device of another speed, relative to the device of this cost."""
        return replace(self, **{name: getattr(self, name) / speed for name in ("forward", "backward", "update", "weights")})


def pipeline_costs(stages: Sequence[Sequence[BlockCost]], keeps: Sequence[Sequence[Keep]]) -> list[StageCost]:
    """Return the costs of all stages of a pipeline, given the blocks of each stage and what each block stores.

    Stages before the first trained parameter only run forward.
    """
    found, backward_bytes, trained = list[StageCost](), 0, False
    for blocks, kept in zip(stages, keeps, strict=True):
        trained = trained or any(block.trained for block in blocks)
        forward, backward = (sum(times) for times in zip(*map(BlockCost.seconds, blocks, kept), strict=True))
        update, weights = sum(block.update for block in blocks), sum(block.weights for block in blocks)
        forward_bytes, returned = _message_bytes(blocks[-1].boundaries[kept[-1]])
        found.append(StageCost(forward, trained * backward, update, forward_bytes, backward_bytes, trained * weights))
        backward_bytes = trained * returned
    return found


@cache
def _message_bytes(boundary: Boundary) -> tuple[int, int]:
    """Return the bytes of both messages of a boundary, which a search over partitions asks for again and again."""
    return boundary.forward_bytes, boundary.backward_bytes


def with_copies(costs: Sequence[StageCost], bandwidth: float) -> list[StageCost]:
    """Return the costs of stages whose cores also copy messages, as on CPUs: bytes / ``bandwidth`` at each end of a message."""
    sizes = [(cost.forward_bytes, cost.backward_bytes) for cost in costs]
    ends = zip(costs, [(0, 0), *sizes], [*sizes[1:], (0, 0)], strict=False)
    return [
        replace(
            cost,
            forward=cost.forward + (before[0] + cost.forward_bytes) / bandwidth,
            backward=cost.backward + (after[1] + cost.backward_bytes) / bandwidth,
        )
        for cost, before, after in ends
    ]


def count_blocks(
    model: Model,
    inputs: TensorSpec,
    numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
) -> tuple[BlockCost, ...]:
    """Return costs in FLOPs: 1 × the forward's FLOPs for forward, 2 × for backward, 1 × for recomputation, 0 for an update.

    The gradients of the parameters are counted as half of backward, although products without parameters have none.

    Args:
        inputs: Form of one microbatch.
        numerics: Number formats, which determine the sizes of messages.

    Raises:
        ModelError: As :meth:`petra.model.Model.profile`.
    """
    return tuple(
        _block_cost(profile, numerics, [unit * profile.flops for unit in (1.0, 3.0, 1.0, 2.0, 0.0, 1.0)])
        for profile in model.profile(inputs)
    )


def profile_blocks(
    model: Model,
    inputs: TensorSpec,
    *,
    optimizer: OptimizerFactory,
    device: torch.device | str = "cpu",
    numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
    seed: int = 0,
    rounds: int = 5,
    compile: str | None = None,
) -> tuple[BlockCost, ...]:
    """Measure costs on the device with the code that a pipeline runs. Only one block at a time is on the device.

    Each time is the median of ``rounds`` measurements, and the mean over blocks that are built and used alike. Before each of them,
    as much memory is written as the other blocks use for a microbatch: in a run, they replace the block's weights in the caches.
    The blocks are built for the measurement. Integer inputs are zeros, others are random.

    Args:
        inputs: Form of one microbatch.
        optimizer: Function that builds the optimizer of a module.
        compile: As of :class:`petra.Runtime`. The first round compiles, and is not measured.

    Raises:
        ModelError: As :meth:`petra.model.Model.profile`.
    """
    device, profiles, costs = torch.device(device), model.profile(inputs), list[BlockCost]()
    forms = [(inputs,), *(profile.outputs for profile in profiles)]
    # Weights, gradients and momentum in float32, and an output.
    sizes = [12 * profile.parameters + sum(spec.bytes for spec in profile.outputs) for profile in profiles]
    for b, profile in enumerate(profiles):
        others = torch.zeros(min(sum(sizes) - sizes[b], CACHE_BYTES) // 4, device=device)
        module = model.build_block(b, seed).to(device).train()
        if numerics.channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if compile is not None:
            from petra.engine.options.compile import compile_block

            compile_block(module, compile)
        x, dy = (tuple(_example(spec, device, numerics.channels_last) for spec in forms[i]) for i in (b, b + 1))
        dy = without_side(dy)
        times: list[float] = []
        smallest = Keep.NOTHING if profile.reversible else Keep.INPUT
        for keep in (smallest, Keep.GRAPH):
            stage = make_stage([module], [keep], first_block=b, seed=seed, numerics=numerics)
            times += _forward_backward_seconds(stage, x, dy, device, rounds, others)
        times.append(_update_seconds(module, optimizer, device, rounds, others))
        # What the gradients of the parameters take: a backward without them is shorter by it.
        frozen = make_stage([module.requires_grad_(False)], [Keep.GRAPH], first_block=b, numerics=numerics)
        times.append(max(0.0, times[3] - _forward_backward_seconds(frozen, x, dy, device, rounds, others)[1]))
        costs.append(_block_cost(profile, numerics, times))
    return _alike([(model.blocks[b].kind, forms[b]) for b in range(len(profiles))], costs)


def _alike(kinds: Sequence[Hashable], costs: Sequence[BlockCost]) -> tuple[BlockCost, ...]:
    """Give equal blocks equal times: their mean."""
    groups: dict[Hashable, list[BlockCost]] = {}
    for kind, cost in zip(kinds, costs, strict=True):
        groups.setdefault(kind, []).append(cost)
    means: dict[Hashable, dict[str, Any]] = {
        kind: {name: fmean(getattr(cost, name) for cost in own) for name in TIMES} for kind, own in groups.items()
    }
    return tuple(replace(cost, **means[kind]) for kind, cost in zip(kinds, costs, strict=True))


def _block_cost(profile: BlockProfile, numerics: Numerics, times: Sequence[float]) -> BlockCost:
    boundaries = {keep: boundary(profile.outputs, keep, numerics, 0) for keep in Keep}
    return BlockCost(profile.name, profile.reversible, boundaries, *times, trained=profile.trained > 0)


def _forward_backward_seconds(
    stage: Stage, x: Streams, dy: Streams, device: torch.device, rounds: int, others: Tensor
) -> tuple[float, float]:
    """Measure forward and backward. The first round is a warm-up.

    Before each pass, memory of other blocks is written to, which replaces data in the caches, and what the pass receives is new.
    """
    forward, backward = [], []
    for m in range(rounds + 1):
        others.add_(1)
        x = tuple(t.clone() for t in x)
        start = synchronized_time(device)
        y = stage.forward(m, x)
        forward.append(synchronized_time(device) - start)
        others.add_(1)
        y, dy = tuple(t.clone() for t in y), tuple(t.clone() for t in dy)
        start = synchronized_time(device)
        stage.backward(m, y, dy)
        backward.append(synchronized_time(device) - start)
    return median(forward[1:]), median(backward[1:])


def _update_seconds(module: nn.Module, build: OptimizerFactory, device: torch.device, rounds: int, others: Tensor) -> float:
    """Measure the optimizer's step. The first round is a warm-up."""
    if not any(p.requires_grad for p in module.parameters()):
        return 0.0
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer, seconds = build(module), []
    for _ in range(rounds + 1):
        others.add_(1)
        start = synchronized_time(device)
        optimizer.step()
        seconds.append(synchronized_time(device) - start)
    return median(seconds[1:])


def _example(spec: TensorSpec, device: torch.device, channels_last: bool) -> Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    tensor = torch.randn(spec.shape, dtype=spec.dtype, device=device)
    return tensor.contiguous(memory_format=torch.channels_last) if channels_last and tensor.dim() == 4 else tensor
