"""Tensor parallelism: linear layers of a stage, divided among the processes of a group (Shoeybi et al. 2019, arXiv 1909.08053).

A module with a method ``divisible(tp)`` says how ``tp`` processes divide its layers, by their names, in words of ``transformers``:

==================================  ========================================================================================
way                                 each process has
==================================  ========================================================================================
sizes such as (q, k, v)             an equal piece of each part of the layer's outputs, such as some heads (``colwise``)
``rowwise``                         the weights for an equal piece of the inputs; the outputs are summed over the group
``replicated_with_grad_allreduce``  the whole layer, which it applies to its own piece; gradients are summed over the group
==================================  ========================================================================================

All other layers, streams, gradients and random numbers are the same in all processes of a group, which follow the same timetable.
:class:`DTensor` makes and differentiates the sums. Parameters are ordinary tensors, which ``parallelize_module`` would replace by
DTensors: functions for lists of tensors, as in optimizers, refuse lists that have both kinds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from petra.distributed import all_gather_objects
from petra.engine.block import BlockRunner, WrappedRunner
from petra.engine.endpoints import DataSource
from petra.engine.options.optimizer_state import Kinds
from petra.engine.options.replicas import Replicas
from petra.engine.recipe import Recipe
from petra.engine.update import GradientNorm, Pending, scalar, squared_norm
from petra.engine.worker import Worker
from petra.errors import ModelError, require
from petra.hooks import Hooks
from petra.plan import Plan
from petra.plan.layout import Layout
from petra.reversible import Gradients
from petra.settings import Runtime
from petra.specs import Message, Streams
from petra.torch_private import hooks_of
from petra.transport import Packing, Transport

Divisible = Callable[[int], dict[str, tuple[int, ...] | str]]
ROWS, SHARED = "rowwise", "replicated_with_grad_allreduce"
SEPARATE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop", "ASGD")
"""torch's optimizers that update each number of a parameter without regard to the others."""
ALIGNMENT = 64
"""Alignment of a process's piece of a message in bytes."""


@dataclass(frozen=True)
class Cut:
    """How a tensor is divided: along ``dim``, of each of its parts, which have ``sizes``, every process of ``mesh`` has a piece."""

    dim: int
    sizes: tuple[int, ...]
    mesh: DeviceMesh

    def own(self, whole: Tensor) -> Tensor:
        """Return this process's pieces of a tensor. One of another size, as in a damaged file, is returned as it is."""
        if self.dim >= whole.dim() or whole.shape[self.dim] != sum(self.sizes):
            return whole
        count, own = self.mesh.size(), self.mesh.get_local_rank()
        return torch.cat([part.chunk(count, self.dim)[own] for part in torch.split(whole, [*self.sizes], self.dim)], self.dim)

    def whole(self, own: Tensor) -> Tensor:
        """Return the tensor of which the processes have the pieces ``own``, on the CPU. All of them must call this method."""
        pieces = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.mesh.size())]
        dist.all_gather(pieces, own.detach().contiguous(), self.mesh.get_group())
        sizes = [size // len(pieces) for size in self.sizes]
        parts = zip(*(torch.split(piece.cpu(), sizes, self.dim) for piece in pieces), strict=True)
        return torch.cat([piece for part in parts for piece in part], self.dim)


class DividedLinear(nn.Module):
    """A linear layer of which each process has a piece. State dictionaries have the whole one.

    Args:
        layer: The whole layer.
        rows: Whether the inputs are divided, and not the outputs.
        sizes: Sizes of the parts of what is divided.
        mesh: The processes.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear, rows: bool, sizes: tuple[int, ...], mesh: DeviceMesh) -> None:
        super().__init__()
        self.rows, self.mesh, self.bias = rows, mesh, None
        cut = Cut(int(rows), sizes, mesh)
        self.cuts = {"weight": cut} if rows or layer.bias is None else {"weight": cut, "bias": cut}
        for name, parameter in layer.named_parameters():
            piece = self.cuts[name].own(parameter.detach()) if name in self.cuts else parameter.detach()
            setattr(self, name, nn.Parameter(piece, parameter.requires_grad))
        self.register_state_dict_post_hook(_join_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_divide_state)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Return this process's piece of the outputs, or the sum over the group if inputs are divided, plus the bias."""
        if not self.rows:  # the backward pass sums the gradient of x over the group
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
            return F.linear(x, self.weight, self.bias)
        y = DTensor.from_local(F.linear(x, self.weight), self.mesh, [Partial()], run_check=False).full_tensor()
        return y if self.bias is None else y + self.bias


def _join_state(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(layer, DividedLinear)
    for name, cut in layer.cuts.items():
        state[prefix + name] = cut.whole(state[prefix + name])


def _divide_state(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(layer, DividedLinear)
    for name in layer.cuts.keys() & {key.removeprefix(prefix) for key in state}:
        state[prefix + name] = layer.cuts[name].own(state[prefix + name])


class SummedRunner(WrappedRunner):
    """Runner of a block that sums the gradients of some parameters over the group."""

    def __init__(self, inner: BlockRunner, summed: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        super().__init__(inner)
        self._summed, self._group = summed, group

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        x, dx, gradients = super().backward(m, y, dy)
        for parameter in (p for p in self._summed if p in gradients):
            gradients[parameter] = gradients[parameter].contiguous()
            dist.all_reduce(gradients[parameter], group=self._group)
        return x, dx, gradients


class GroupNorm(GradientNorm):
    """Computes the squared norm of the gradient of a stage, of which each process of a group has pieces.

    Args:
        divided: Parameters that are divided.
        others: Parameters that every process has.
        group: The processes.
    """

    def __init__(self, divided: Sequence[nn.Parameter], others: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._divided, self._others, self._group = divided, others, group

    def run(self, pending: Pending) -> None:
        square = squared_norm(self._divided)
        dist.all_reduce(square, group=self._group)
        square += squared_norm(self._others) if self._others else scalar(0, square.device)
        pending.squared_norm = pending.squared_clip_norm = square


class Slices(Packing):
    """Packs messages of which each process sends a slice to its counterpart in the next group, whose processes share theirs.

    Args:
        whole: Packing of whole messages.
        mesh: The processes of this group.
    """

    def __init__(self, whole: Packing, mesh: DeviceMesh) -> None:
        self.spec, self.device, self.route = whole.spec, whole.device, whole.route
        self._whole, self._mesh, self._packed = whole, mesh, dict[int, Tensor]()
        self.bytes = -(-whole.bytes // (ALIGNMENT * mesh.size())) * ALIGNMENT
        whole.bytes = mesh.size() * self.bytes

    def pack(self, message: Message) -> Tensor:
        whole = self._whole.pack(message)
        own = whole.chunk(self._mesh.size())[self._mesh.get_local_rank()]
        self._packed[id(own)] = whole
        return own

    def release(self, buffer: Tensor) -> None:
        self._whole.release(self._packed.pop(id(buffer)))

    def unpack(self, buffer: Tensor) -> Message:
        whole = self._whole.buffer()
        dist.all_gather([*whole.chunk(self._mesh.size())], buffer, self._mesh.get_group())
        return self._whole.unpack(whole)


class TensorReplicas(Replicas):
    """Replicas, one or more, each of whose stages is divided among the processes of a group.

    Raises:
        ConfigError: If a setting needs whole parameters, or would lose a process of a group.
    """

    def __init__(
        self, layout: Layout, position: int, recipe: Recipe, runtime: Runtime, device: torch.device, others: Replicas | None
    ) -> None:
        own = [type(each).__name__ for each in recipe.extensions if not type(each).__module__.startswith("petra.")]
        require(others is None, "tp", "1 with replicas that may be lost", layout.tp)
        require(runtime.compile is None, "compile", "None with tp > 1", runtime.compile)
        require(not own, "tp", f"1 with the extension {', '.join(own)}, which may need whole parameters", layout.tp)
        super().__init__(layout, position, range(layout.dp), device)
        self._mesh = self.mesh["tp"]
        self.member = self._mesh.get_local_rank()
        self._shared: list[nn.Module] = []
        self._cuts: dict[Tensor, Cut] = {}

    def divided(self, plan: Plan) -> Plan:
        """Return the plan with functions that build this process's piece of each block."""
        blocks = [replace(block, build=partial(self._build, block.build)) for block in plan.model.blocks]
        return replace(plan, model=replace(plan.model, blocks=tuple(blocks)))

    def _build(self, build: Callable[[], nn.Module]) -> nn.Module:
        block = build()
        for module in [*block.modules()]:
            divisible: Divisible | None = getattr(module, "divisible", None)
            dropout = max([own.p for own in module.modules() if isinstance(own, nn.Dropout)], default=0) if divisible else 0
            require(dropout == 0, "dropout", "0 with tp, as all processes draw the same numbers", dropout, ModelError)
            for name, way in divisible(self._mesh.size()).items() if divisible else ():
                layers = [own for _, own in block.named_modules(remove_duplicate=False) if own is module.get_submodule(name)]
                require(len(layers) == 1, "tp", "1 with layers that occur twice", name, ModelError)
                if way == SHARED:
                    self._shared.append(module.get_submodule(name))
                else:
                    module.set_submodule(name, self._divide(name, module.get_submodule(name), way))
        return block

    def _divide(self, name: str, layer: nn.Module, way: tuple[int, ...] | str) -> DividedLinear:
        count = self._mesh.size()
        known = isinstance(layer, nn.Linear) and (way == ROWS or (isinstance(way, tuple) and sum(way) == layer.out_features))
        require(known, "tp", "1 with layers that can't be divided", f"{name}: {way} of {layer}", ModelError)
        assert isinstance(layer, nn.Linear)
        expected = f"parameters of {name} without hooks, which would get pieces of gradients"
        require(not any(any(hooks_of(p)) for p in layer.parameters()), "tp", expected, "some with", ModelError)
        sizes = way if isinstance(way, tuple) else (layer.in_features,)
        expected = f"a divisor of {', '.join(map(str, sizes))}, the sizes of {name}"
        require(all(size % count == 0 for size in sizes), "tp", expected, count)
        return DividedLinear(layer, way == ROWS, sizes, self._mesh)

    def attach(self, workers: Sequence[Worker], hooks: Hooks, transport: Transport) -> None:
        """Complete gradients, norms and messages.

        Raises:
            ConfigError: If an optimizer needs whole parameters, or no layer has been divided.
        """
        for worker in workers:
            optimizer, stage, parts = worker.update.optimizer, worker.stage, worker.update.parts
            accepted = optimizer is None or type(optimizer) in [getattr(torch.optim, name) for name in SEPARATE]
            name = type(optimizer).__name__
            require(accepted, "tp", "1 with an optimizer that needs whole parameters, or that isn't torch's", name)
            layers = [layer for layer in stage.module.modules() if isinstance(layer, DividedLinear)]
            self._cuts |= {getattr(layer, name): cut for layer in layers for name, cut in layer.cuts.items()}
            shared = [p for module in self._shared for p in module.parameters() if p.requires_grad]
            stage.runners = [SummedRunner(r, shared, self._mesh.get_group()) if shared else r for r in stage.runners]
            own = stage.gradients.parameters
            divided, others = ([p for p in own if (p in self._cuts) is found] for found in (True, False))
            if divided:
                norm = next(i for i, part in enumerate(parts) if isinstance(part, GradientNorm))
                parts[norm] = GroupNorm(divided, others, self._mesh.get_group())
        require(any(all_gather_objects(len(self._cuts))), "tp", "1 for a model without layers that can be divided", self.layout.tp)
        if self.size > 1:
            super().attach(workers, hooks, transport)
        for port in (transport.upstream, transport.downstream):
            if port is not None:
                port.outgoing, port.incoming = Slices(port.outgoing, self._mesh), Slices(port.incoming, self._mesh)

    def whole(self, kinds: Kinds) -> Kinds:
        return self._changed(kinds, lambda cut, own, p: cut.whole(own) if own.shape == p.shape else own)

    def own(self, kinds: Kinds) -> Kinds:
        return self._changed(kinds, lambda cut, whole, p: cut.own(whole))

    def _changed(self, kinds: Kinds, change: Callable[[Cut, Tensor, Tensor], Tensor]) -> Kinds:
        changed: Kinds = defaultdict(dict)
        for kind, tensors in kinds.items():
            changed[kind] = {p: change(self._cuts[p], t, p) if p in self._cuts else t for p, t in tensors.items()}
        return changed

    def share(self, data: DataSource, microbatches: int, *, evaluation: bool) -> tuple[DataSource, int]:
        return super().share(data, microbatches, evaluation=evaluation) if self.size > 1 else (data, microbatches)

    def total(self, values: Tensor) -> None:
        if self.member:  # all processes of a group have the same values
            values.zero_()
        super().total(values)
