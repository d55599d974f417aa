"""What each block of a model costs: seconds of its F and B for each thing it can keep, and bytes, measured or counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petra.cost_model.simulator import Link
from petra.diagnostics.activation_memory import graph_bytes
from petra.engine.stage import Stage
from petra.method import Keep
from petra.model import BlockProfile, Model
from petra.specs import Streams, TensorSpec

Build = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class BlockCost:
    """One block and one microbatch, in seconds (or any one unit of time) and bytes.

    Attributes:
        forward, backward: with nothing kept (a block that can't be inverted: with its input kept).
        graph_forward, graph_backward: with the graph kept.
        update: one update of its parameters.
        input_bytes, output_bytes: of its streams.
        graph_bytes: that a kept graph holds, the streams included.
        parameter_bytes: of the parameters alone.
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

    def seconds(self, keep: Keep) -> tuple[float, float]:
        """F and B."""
        return (self.graph_forward, self.graph_backward) if keep is Keep.GRAPH else (self.forward, self.backward)

    def held_bytes(self, keep: Keep) -> int:
        """Of one microbatch between F and B."""
        if keep is Keep.GRAPH:
            return self.graph_bytes
        return 0 if keep is Keep.NOTHING and self.reversible else self.input_bytes


def count_blocks(model: Model, inputs: TensorSpec) -> tuple[BlockCost, ...]:
    """Costs by FLOPs: a forward takes its FLOPs, its backward twice as many, recomputation once more; updates are free.

    Raises:
        ModelError: as :meth:`petra.model.Model.profile`.
    """
    units = (1.0, 3.0, 1.0, 2.0, 0.0)
    return tuple(
        _cost(model, profile, specs, b, [unit * profile.flops for unit in units])
        for b, (profile, specs) in enumerate(_with_inputs(model, inputs))
    )


def profile_blocks(
    model: Model,
    inputs: TensorSpec,
    *,
    optimizer: Build,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
    channels_last: bool = False,
    seed: int = 0,
    rounds: int = 5,
) -> tuple[BlockCost, ...]:
    """Costs measured on the device, one block there at a time, by the code that a pipeline runs.

    The least of ``rounds`` counts: what else the machine does only adds. The model's own weights are not touched. Integer inputs
    are zeros.

    Raises:
        ModelError: as :meth:`petra.model.Model.profile`.
    """
    device = torch.device(device)
    costs = []
    for b, (profile, specs) in enumerate(_with_inputs(model, inputs)):
        module = model.build_block(b, seed).to(device).train()
        if channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x, dy = (tuple(_filled(spec, device, channels_last) for spec in group) for group in (specs, profile.outputs))
        lean = Keep.NOTHING if profile.reversible else Keep.INPUT
        times: list[float] = []
        for keep in (lean, Keep.GRAPH):
            stage = Stage([module], [keep], first_block=b, seed=seed, autocast=autocast, channels_last=channels_last)
            times += _times(stage, x, dy, device, rounds)
        costs.append(_cost(model, profile, specs, b, (*times, _update_seconds(module, optimizer, device, rounds)), autocast))
    return tuple(costs)


def measure_link(device: torch.device | str = "cpu", rounds: int = 7, nbytes: int = 1 << 22) -> Link:
    """Latency and bandwidth between the first two processes, in every process; each makes the call.

    From the quickest of ``rounds`` round trips of an empty and of a large message.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Link()
    rank, found = dist.get_rank(), [0.0, 0.0]
    for i, size in enumerate((1, nbytes)):
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        times = []
        for _ in range(rounds + 1):
            start = now(buffer.device)
            if rank < 2:
                first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
                first(buffer, 1 - rank)
                second(buffer, 1 - rank)
            times.append(now(buffer.device) - start)
        found[i] = min(times[1:]) / 2
    dist.broadcast_object_list(found, 0)
    latency, large = found
    return Link(bandwidth=nbytes / max(large - latency, 1e-9), latency=latency)


def _with_inputs(model: Model, inputs: TensorSpec) -> list[tuple[BlockProfile, tuple[TensorSpec, ...]]]:
    profiles = model.profile(inputs)
    return list(zip(profiles, [(inputs,), *(profile.outputs for profile in profiles)], strict=False))


def _cost(
    model: Model,
    profile: BlockProfile,
    inputs: tuple[TensorSpec, ...],
    block: int,
    seconds: Sequence[float],
    autocast: torch.dtype | None = None,
) -> BlockCost:
    forward, backward, graph_forward, graph_backward, update = seconds
    return BlockCost(
        name=profile.name,
        reversible=profile.reversible,
        forward=forward,
        backward=backward,
        graph_forward=graph_forward,
        graph_backward=graph_backward,
        update=update,
        input_bytes=sum(spec.bytes for spec in inputs),
        output_bytes=sum(spec.bytes for spec in profile.outputs),
        graph_bytes=graph_bytes(model, range(block, block + 1), inputs, [Keep.GRAPH], autocast=autocast),
        parameter_bytes=sum(p.numel() * p.element_size() for p in _on_meta(model, block).parameters()),
    )


def _on_meta(model: Model, block: int) -> nn.Module:
    with torch.device("meta"):
        return model.blocks[block].build()


def _times(stage: Stage, x: Streams, dy: Streams, device: torch.device, rounds: int) -> tuple[float, float]:
    """Seconds of F and of B, after one of each that does not count."""
    forward, backward = [], []
    for m in range(rounds + 1):
        start = now(device)
        y = stage.forward(m, x)
        middle = now(device)
        stage.backward(m, y, dy)
        forward.append(middle - start)
        backward.append(now(device) - middle)
    return min(forward[1:]), min(backward[1:])


def _update_seconds(module: nn.Module, optimizer: Build, device: torch.device, rounds: int) -> float:
    if not any(p.requires_grad for p in module.parameters()):
        return 0.0
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    made, seconds = optimizer(module), []
    for _ in range(rounds + 1):
        start = now(device)
        made.step()
        seconds.append(now(device) - start)
    return min(seconds[1:])


def now(device: torch.device) -> float:
    """Seconds on the host's clock when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _filled(spec: TensorSpec, device: torch.device, channels_last: bool) -> Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    tensor = torch.randn(spec.shape, dtype=spec.dtype, device=device)
    return tensor.contiguous(memory_format=torch.channels_last) if channels_last and tensor.dim() == 4 else tensor
