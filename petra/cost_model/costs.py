"""Costs of blocks, measured or counted in FLOPs, and of the stages made of them: seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from petra.cost_model.block_memory import BuildOptimizer, Known, count_block
from petra.cost_model.machines import synchronized_time
from petra.engine.build import make_stage
from petra.engine.stage import Stage
from petra.method import Keep
from petra.model import BlockProfile, Model
from petra.plan.messages import boundary, returns_activations
from petra.settings import Numerics
from petra.specs import Streams, TensorSpec

TIMES = ("forward", "backward", "graph_forward", "graph_backward", "update", "weights")
"""Attributes of a :class:`BlockCost` that are times, in the order in which they are measured."""
CACHE_BYTES = 1 << 26
"""Memory beyond which writing to more of it hardly changes what the caches still contain."""
PARAMETER_COPIES = 3
"""Copies of the parameters in a stage by default: weights, gradients and one optimizer state (momentum)."""


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block for one microbatch. Times are in seconds, or in any other unit if all blocks use the same.

    Attributes:
        forward, backward: Times with ``keep=nothing`` (``keep=input`` for blocks that aren't reversible).
        graph_forward, graph_backward: Times with ``keep=graph``.
        update: Time of one update of the block's parameters.
        input_bytes: Size of the input streams.
        output_bytes: Size of a message with the output streams.
        graph_bytes: Size of the stored autograd graph, streams included.
        parameter_bytes: Size of the parameters, counted once.
        weights: Part of either backward that computes the gradients of the parameters.
    """

    name: str
    reversible: bool
    forward: float
    backward: float
    graph_forward: float
    graph_backward: float
    update: float
    input_bytes: int
    output_bytes: int
    graph_bytes: int
    parameter_bytes: int
    weights: float = 0.0

    def seconds(self, keep: Keep) -> tuple[float, float]:
        """Return the times of forward and backward."""
        return (self.graph_forward, self.graph_backward) if keep is Keep.GRAPH else (self.forward, self.backward)

    def stored_bytes(self, keep: Keep) -> int:
        """Return the bytes stored for one microbatch between forward and backward."""
        if keep is Keep.GRAPH:
            return self.graph_bytes
        return 0 if keep is Keep.REFETCH or (keep is Keep.NOTHING and self.reversible) else self.input_bytes


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage for one microbatch.

    Attributes:
        forward, backward: Seconds; backward includes recomputation.
        update: Seconds of one update.
        forward_bytes, backward_bytes: Sizes of the messages to the next and to the previous stage.
        stored_bytes: Bytes stored for each microbatch between forward and backward.
        fixed_bytes: Bytes that don't depend on the number of microbatches: copies of the parameters, and the largest graph that
            exists only during a backward.
        weights: Part of ``backward`` that computes the gradients of the parameters.
    """

    forward: float
    backward: float
    update: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    stored_bytes: int = 0
    fixed_bytes: int = 0
    weights: float = 0.0

    def memory(self, microbatches: int) -> int:
        """Estimate the bytes of the stage from sums over its blocks, which a search for a partition can afford for every range.

        The sum leaves out messages, stashed weights, the gradients that a backward adds to the accumulated ones, and what
        operations allocate beside the graph, all of which :func:`petra.cost_model.memory.predict_memory` counts.

        Args:
            microbatches: Microbatches in flight.
        """
        return self.fixed_bytes + microbatches * self.stored_bytes

    def on(self, speed: float) -> StageCost:
        """Return the cost on a device of another speed, relative to the device of this cost."""
        times = ("forward", "backward", "update", "weights")
        return replace(self, **{name: getattr(self, name) / speed for name in times})


def stage_cost(
    blocks: Sequence[BlockCost],
    keeps: Sequence[Keep],
    *,
    parameter_copies: int = PARAMETER_COPIES,
) -> StageCost:
    """Return the cost of consecutive blocks as the first stage of a pipeline, which sends nothing back.

    Messages on their way are not part of the memory; each boundary has at most d + 1 of them in each direction.

    Args:
        keeps: What each block stores.
        parameter_copies: Copies of the parameters in memory: weights, gradients, optimizer states, a moving average.
    """
    times = [block.seconds(keep) for block, keep in zip(blocks, keeps, strict=True)]
    temporary_graphs = [block.graph_bytes for block, keep in zip(blocks, keeps, strict=True) if keep is not Keep.GRAPH]
    return StageCost(
        forward=sum(forward for forward, _ in times),
        backward=sum(backward for _, backward in times),
        update=sum(block.update for block in blocks),
        forward_bytes=blocks[-1].output_bytes,
        stored_bytes=sum(block.stored_bytes(keep) for block, keep in zip(blocks, keeps, strict=True)),
        fixed_bytes=parameter_copies * sum(block.parameter_bytes for block in blocks) + max(temporary_graphs, default=0),
        weights=sum(block.weights for block in blocks),
    )


def pipeline_costs(
    stages: Sequence[Sequence[BlockCost]], keeps: Sequence[Sequence[Keep]], *, parameter_copies: int = PARAMETER_COPIES
) -> list[StageCost]:
    """Return the costs of all stages of a pipeline, given the blocks of each stage and what each block stores.

    A backward message contains δ, and also x̃ if the stage that receives it stores nothing from which it could compute its output.
    """
    costs = [stage_cost(blocks, kept, parameter_copies=parameter_copies) for blocks, kept in zip(stages, keeps, strict=True)]
    backward = [(2 if returns_activations(kept[-1]) else 1) * cost.forward_bytes for cost, kept in zip(costs, keeps, strict=True)]
    return [replace(cost, backward_bytes=size) for cost, size in zip(costs, [0, *backward], strict=False)]


def count_blocks(
    model: Model,
    inputs: TensorSpec,
    numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
) -> tuple[BlockCost, ...]:
    """Return costs in FLOPs: 1 × the forward's FLOPs for forward, 2 × for backward, 1 × for recomputation, 0 for an update.

    The gradients of the parameters are counted as half of backward, although products without parameters have none.

    Args:
        inputs: Form of one microbatch.
        numerics: Number formats, which determine the sizes of graphs and messages.

    Raises:
        ModelError: As :meth:`petra.model.Model.profile`.
    """
    units = (1.0, 3.0, 1.0, 2.0, 0.0, 1.0)
    known: Known = {}
    return tuple(
        _block_cost(model, profile, specs, b, [unit * profile.flops for unit in units], numerics, known)
        for b, (profile, specs) in enumerate(_profiles_with_inputs(model, inputs))
    )


def profile_blocks(
    model: Model,
    inputs: TensorSpec,
    *,
    optimizer: BuildOptimizer,
    device: torch.device | str = "cpu",
    numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
    seed: int = 0,
    rounds: int = 5,
) -> tuple[BlockCost, ...]:
    """Measure costs on the device with the code that a pipeline runs. Only one block at a time is on the device.

    Each time is the median of ``rounds`` measurements. Before each of them, as much memory is written as the other blocks use for a
    microbatch: in a run, they replace the block's weights in the caches. The blocks are built for the measurement. Integer inputs
    are zeros, others are random.

    Args:
        inputs: Form of one microbatch.
        optimizer: Function that builds the optimizer of a module.

    Raises:
        ModelError: As :meth:`petra.model.Model.profile`.
    """
    device = torch.device(device)
    profiles = _profiles_with_inputs(model, inputs)
    unknown = (0.0,) * len(TIMES)
    known: Known = {}
    costs = [_block_cost(model, profile, specs, b, unknown, numerics, known) for b, (profile, specs) in enumerate(profiles)]
    sizes = [cost.graph_bytes + PARAMETER_COPIES * cost.parameter_bytes for cost in costs]
    for b, (profile, specs) in enumerate(profiles):
        others = _Memory(sum(sizes) - sizes[b], device)
        module = model.build_block(b, seed).to(device).train()
        if numerics.channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x, dy = (tuple(_example(spec, device, numerics.channels_last) for spec in specs_) for specs_ in (specs, profile.outputs))
        times: list[float] = []
        smallest = Keep.NOTHING if profile.reversible else Keep.INPUT
        for keep in (smallest, Keep.GRAPH):
            stage = make_stage([module], [keep], first_block=b, seed=seed, numerics=numerics)
            times += _forward_backward_seconds(stage, x, dy, device, rounds, others)
        times.append(_update_seconds(module, optimizer, device, rounds, others))
        # What the gradients of the parameters take: a backward without them is shorter by it.
        frozen = make_stage([module.requires_grad_(False)], [Keep.GRAPH], first_block=b, numerics=numerics)
        times.append(max(0.0, times[3] - _forward_backward_seconds(frozen, x, dy, device, rounds, others)[1]))
        measured: dict[str, Any] = dict(zip(TIMES, times, strict=True))
        costs[b] = replace(costs[b], **measured)
    return tuple(costs)


def _profiles_with_inputs(model: Model, inputs: TensorSpec) -> list[tuple[BlockProfile, tuple[TensorSpec, ...]]]:
    """Return the profile of each block with the form of its input."""
    profiles = model.profile(inputs)
    return list(zip(profiles, [(inputs,), *(profile.outputs for profile in profiles)], strict=False))


def _block_cost(
    model: Model,
    profile: BlockProfile,
    inputs: tuple[TensorSpec, ...],
    block: int,
    seconds: Sequence[float],
    numerics: Numerics,
    known: Known,
) -> BlockCost:
    if (kind := ("parameters", model.blocks[block].kind)) not in known:
        with torch.device("meta"):
            known[kind] = sum(p.numel() * p.element_size() for p in model.blocks[block].build().parameters())
    return BlockCost(
        name=profile.name,
        reversible=profile.reversible,
        **dict(zip(TIMES, seconds, strict=True)),
        input_bytes=sum(spec.bytes for spec in inputs),
        output_bytes=boundary(profile.outputs, Keep.INPUT, numerics, 0).forward_bytes,
        graph_bytes=count_block(model, block, inputs, Keep.GRAPH, numerics=numerics, known=known).stored,
        parameter_bytes=known[kind],
    )


class _Memory:
    """Memory that other blocks use between two passes of a block.

    Args:
        nbytes: Its size. Of more than ``CACHE_BYTES``, only these are allocated.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._tensor = torch.zeros(min(nbytes, CACHE_BYTES) // 4, device=device)

    def use(self) -> None:
        """Write to all of it, which replaces other data in the caches."""
        self._tensor.add_(1)


def _forward_backward_seconds(
    stage: Stage, x: Streams, dy: Streams, device: torch.device, rounds: int, others: _Memory
) -> tuple[float, float]:
    """Measure forward and backward. The first round is a warm-up.

    Before each pass, the other blocks have used their memory, and the neighbour has just computed what the pass receives.
    """
    forward, backward = [], []
    for m in range(rounds + 1):
        others.use()
        x = tuple(t.clone() for t in x)
        start = synchronized_time(device)
        y = stage.forward(m, x)
        forward.append(synchronized_time(device) - start)
        others.use()
        y, dy = tuple(t.clone() for t in y), tuple(t.clone() for t in dy)
        start = synchronized_time(device)
        stage.backward(m, y, dy)
        backward.append(synchronized_time(device) - start)
    return median(forward[1:]), median(backward[1:])


def _update_seconds(
    module: nn.Module, build_optimizer: BuildOptimizer, device: torch.device, rounds: int, others: _Memory
) -> float:
    """Measure the optimizer's step. The first round is a warm-up."""
    if not any(p.requires_grad for p in module.parameters()):
        return 0.0
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer, seconds = build_optimizer(module), []
    for _ in range(rounds + 1):
        others.use()
        start = synchronized_time(device)
        optimizer.step()
        seconds.append(synchronized_time(device) - start)
    return median(seconds[1:])


def _example(spec: TensorSpec, device: torch.device, channels_last: bool) -> Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    tensor = torch.randn(spec.shape, dtype=spec.dtype, device=device)
    return tensor.contiguous(memory_format=torch.channels_last) if channels_last and tensor.dim() == 4 else tensor
