"""Graphs that blocks store while updates change the weights that these graphs refer to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, disable_saved_tensors_hooks, get_gradient_edge, saved_tensors_hooks

from petra.engine.block import BlockRunner, KeepGraph
from petra.engine.block_function import Around, BlockFunction
from petra.engine.weights import WeightVersions
from petra.errors import ModelError, require
from petra.reversible import Gradients
from petra.reversible.replay import NOTHING
from petra.specs import Streams
from petra.torch_private import cast_leaf, preserve_version_counter, storage_key

RECOMPUTES = (
    "activation checkpointing and other saved-tensor hooks inside a block can't be used with method.keep=graph and "
    "method.weights=current where updates come between forward and backward: the recomputation would use newer weights; use "
    "method.keep=input or method.weights=stashed"
)


@contextmanager
def overwriting(runners: Sequence[BlockRunner], parameters: tuple[Tensor, ...]) -> Iterator[None]:
    """Let an optimizer step in the body of the ``with`` statement write to parameters that stored graphs refer to.

    Args:
        runners: Runners of a stage's blocks.
        parameters: The trained parameters of the stage.

    Raises:
        ConfigError: If the step gives a parameter other memory, while graphs keep some of the former weights.
    """
    current = [runner for runner in runners if not runner.versions.stashed]
    used = [p for runner in current if any(s.outputs for s in runner.stored.values()) for p in runner.parameters.values()]
    before = [(p.data, storage_key(p)) for p in used]  # the tensor keeps the memory from being given to others
    with preserve_version_counter(parameters):
        yield
    replaced = any(storage_key(p) != key for p, (_, key) in zip(used, before, strict=True))
    expected = (
        "one that writes to parameters in place, as stored graphs refer to them (or method.keep=input or method.weights=stashed)"
    )
    require(not replaced, "optimizer", expected, "one that assigns p.data")


class ForbidRecomputation(Around):
    """Forbids saved-tensor hooks inside a block.

    Raises:
        ModelError: If an evaluation in training sets such hooks.
    """

    def __init__(self, block: nn.Module) -> None:
        self._name = type(block).__name__

    def context(self, x: Tensor, *, training: bool) -> AbstractContextManager[object]:
        return self._without_hooks() if training else NOTHING

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        try:
            with ExitStack() as stack:
                with suppress(RuntimeError):  # a measurement outside of the block has hooks of its own
                    stack.enter_context(disable_saved_tensors_hooks(RECOMPUTES))
                yield
        except RuntimeError as error:
            if str(error) != RECOMPUTES:
                raise
            raise ModelError(f"{self._name}: {RECOMPUTES}") from error


class Cast(NamedTuple):
    """A cast of a parameter that a graph would store, or a view of one."""

    parameter: Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the cast of the parameter's present value."""
        return self.parameter.detach().to(self.dtype).as_strided(self.size, self.stride, self.offset)


class FollowUpdates(KeepGraph):
    """Stores graphs that refer to the block's parameters where they would store casts of them, as under autocast.

    A backward pass casts the parameters again, so it uses the weights after all updates, as without autocast. Graphs get smaller by
    the casts, which each of them would otherwise store. :class:`ForbidRecomputation` must be around the block's function.
    """

    def __init__(self, function: BlockFunction, versions: WeightVersions, *, first: bool = False) -> None:
        super().__init__(function, versions, first=first)
        self._own = {id(p) for p in self.parameters.values()}
        self._edges: dict[int, list[GradientEdge]] = {}

    def forward(self, m: int, x: Streams) -> Streams:
        if not self._edges:  # the first pass of a run
            self._forbid_recomputation(m, x)
        # A change of a parameter's type, as of weights in bfloat16 during a step, gives it another edge.
        self._edges[m] = [get_gradient_edge(p) for p in self.parameters.values()]
        with saved_tensors_hooks(self._pack, _unpack):
            return super().forward(m, x)

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        return self.differentiate(self.stored.pop(m), dy, self.versions.for_backward(m), self._edges.pop(m))

    def _forbid_recomputation(self, m: int, x: Streams) -> None:
        """Evaluate the block once more without hooks, which would hide those of the block from :class:`ForbidRecomputation`."""
        parts = self.function.module.modules()
        before = [(part, name, t, t.clone()) for part in parts for name, t in part.named_buffers(recurse=False)]
        with torch.enable_grad(), self.function.keeping_statistics():
            self.function(m, tuple(t.detach().requires_grad_(t.is_floating_point()) for t in x), None)
        with torch.no_grad():
            for part, name, buffer, old in before:
                setattr(part, name, buffer.copy_(old))

    def _pack(self, tensor: Tensor) -> Tensor | Cast:
        leaf = cast_leaf(tensor)
        if leaf is None or id(leaf) not in self._own:
            return tensor
        return Cast(leaf, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _unpack(packed: Tensor | Cast) -> Tensor:
    return packed.tensor() if isinstance(packed, Cast) else packed
