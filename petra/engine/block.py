"""One block in a pipeline: forward passes of many microbatches, each followed later by its backward pass.

=======  =============  ========================  ======================================================================
keep     class          forward pass stores       backward pass
=======  =============  ========================  ======================================================================
graph    KeepGraph      its input and its graph   differentiates the graph
input    Recompute      its input                 evaluates the block again with a graph, and differentiates that
refetch  Recompute      nothing                   fetches the input from the data source again; then as ``input``
nothing  Reconstruct    nothing (see there)       reconstructs the input from the output and differentiates, in one evaluation
=======  =============  ========================  ======================================================================

The weights that each pass uses come from :mod:`petra.engine.weights`; a version of None means the current
parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from petra.engine.block_function import BlockFunction
from petra.engine.weights import WeightVersion, WeightVersions
from petra.method import Keep
from petra.reversible import Gradients
from petra.specs import Streams, detached, in_own_memory, without_side
from petra.torch_private import vector_jacobian_products

Fetch = Callable[[int], Streams]
"""Function of a microbatch that returns the input of the model's first block."""


@dataclass
class Stored:
    """Activations that a block stores for one microbatch between its forward and its backward pass."""

    inputs: Streams
    outputs: Streams = ()
    """Outputs with their graph; empty unless the block keeps its graph."""


class BlockRunner(ABC):
    """One block with its state between passes. Subclasses differ in what they store in the forward pass.

    Args:
        function: The block as a function of input, weights and microbatch.
        versions: The versions of its weights.
        first: True for the first block of the model. It takes the data, which need no gradient.

    Attributes:
        parameters: Trained parameters by name.
        stored: Stored activations of each microbatch in flight.
    """

    keep: Keep

    def __init__(self, function: BlockFunction, versions: WeightVersions, *, first: bool = False) -> None:
        self.function, self.versions, self.parameters = function, versions, function.parameters
        self.stored: dict[int, Stored] = {}
        self._trained = tuple(self.parameters.values())
        self._first = first

    @abstractmethod
    def forward(self, m: int, x: Streams) -> Streams:
        """Return the block's output for microbatch ``m``, detached, and store what the backward pass needs."""

    @abstractmethod
    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        """Return the block's input for microbatch ``m``, the gradient with respect to it, and those of the parameters.

        Args:
            y: The block's output as the next block returned it; used only by :class:`Reconstruct`.
            dy: Gradient with respect to the output.
        """

    def with_graph(self, m: int, x: Streams, version: WeightVersion | None) -> Stored:
        """Evaluate the block with its graph."""
        inputs = tuple(t.detach().requires_grad_(not self._first and t.is_floating_point()) for t in x)
        try:
            with torch.enable_grad():
                return Stored(inputs, self.function(m, inputs, version))
        except RuntimeError as error:
            if "in-place operation" in str(error):  # autograd refuses to change a leaf before the function can see a change
                with torch.no_grad(), self.function.keeping_statistics():
                    self.function(m, tuple(t.detach().clone() for t in x), version)
            raise

    def differentiate(
        self, stored: Stored, dy: Streams, version: WeightVersion | None, edges: Sequence[GradientEdge] | None = None
    ) -> tuple[Streams, Streams, Gradients]:
        """Return what :meth:`backward` returns, given the weights' edges in the graph if they may have got others since."""
        weights: Sequence[Any] = edges or (self._trained if version is None else [version[name] for name in self.parameters])
        connected = [(y, d) for y, d in zip(without_side(stored.outputs), dy, strict=True) if y.requires_grad]
        if not connected:  # no output depends on the input or a weight
            return detached(stored.inputs), tuple(torch.zeros_like(t) for t in stored.inputs if t.requires_grad), {}
        inputs = [t for t in stored.inputs if t.requires_grad]
        outputs, gradients = zip(*connected, strict=True)
        # Activation checkpointing inside the block reads the parameters again.
        with self.function.using(version):
            found = vector_jacobian_products(outputs, [*inputs, *weights], gradients)
        dx = tuple([torch.zeros_like(t) if d is None else d for t, d in zip(inputs, found, strict=False)])
        of_parameters = {p: g for p, g in zip(self._trained, found[len(inputs) :], strict=True) if g is not None}
        return detached(stored.inputs), dx, of_parameters


class KeepGraph(BlockRunner):
    """Evaluates the block once, and stores its autograd graph."""

    keep = Keep.GRAPH

    def forward(self, m: int, x: Streams) -> Streams:
        self.stored[m] = self.with_graph(m, x, self.versions.stash(m))
        return detached(self.stored[m].outputs)

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        return self.differentiate(self.stored.pop(m), dy, self.versions.for_backward(m))


class Recompute(BlockRunner):
    """Stores the block's input, and evaluates the block again in the backward pass, which alone updates running statistics.

    Attributes:
        fetch: Returns the input of a microbatch again, for the first block of a model, which then stores nothing; or None.
    """

    keep = Keep.INPUT
    fetch: Fetch | None = None

    def forward(self, m: int, x: Streams) -> Streams:
        version = self.versions.stash(m)
        with self.function.to_be_repeated():
            y = self.function(m, x, version)
        if self.keep is Keep.INPUT:
            self.stored[m] = Stored(tuple(in_own_memory(t) for t in x))
        return y

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        version = self.versions.for_backward(m)
        x = self.stored.pop(m).inputs if self.fetch is None else self.fetch(m)
        return self.differentiate(self.with_graph(m, x, version), dy, version)


class Reconstruct(BlockRunner):
    """Stores nothing, and computes a reversible block's input from its output in the backward pass, which alone updates
    running statistics."""

    keep = Keep.NOTHING

    def forward(self, m: int, x: Streams) -> Streams:
        version = self.versions.stash(m)
        with self.function.to_be_repeated():
            return self.function(m, x, version)

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        version = self.versions.for_backward(m)
        if version is None or not self.versions.reconstructs_with_current:
            return self.function.inverse_vjp(m, y, dy, version)
        # Reconstruct with the current parameters, but compute the gradient at the stashed version.
        return self.differentiate(self.with_graph(m, self.function.inverse(m, y), version), dy, version)


class WrappedRunner(BlockRunner):
    """Base of what changes or observes the passes of a block: has the attributes of the runner that it contains.

    Args:
        inner: The runner.
    """

    def __init__(self, inner: BlockRunner) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, m: int, x: Streams) -> Streams:
        return self.inner.forward(m, x)

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        return self.inner.backward(m, y, dy)


def block_runner(
    function: BlockFunction, keep: Keep, versions: WeightVersions, *, first: bool = False, fetch: Fetch | None = None
) -> BlockRunner:
    """Return the runner of a block.

    Args:
        function, versions, first: As for :class:`BlockRunner`.
        keep: What the block stores between its passes.
        fetch: Returns the block's input for a microbatch again; for ``Keep.REFETCH``.
    """
    kinds: dict[Keep, type[BlockRunner]] = {kind.keep: kind for kind in (KeepGraph, Recompute, Reconstruct)}
    runner = kinds.get(keep, Recompute)(function, versions, first=first)
    if isinstance(runner, Recompute) and keep is Keep.REFETCH and fetch is not None:
        runner.keep, runner.fetch = keep, fetch
    return runner
