"""One block in a pipeline: forward passes of many microbatches, each followed later by its backward pass.

=======  =============  ========================  ======================================================================
keep     class          forward pass stores       backward pass
=======  =============  ========================  ======================================================================
graph    KeepGraph      its input and its graph   differentiates the graph
input    Recompute      its input                 evaluates the block again with a graph, and differentiates that
refetch  Refetch        nothing                   fetches the input from the data source again; then as ``input``
nothing  Reconstruct    nothing                   reconstructs the input from the output and differentiates, in one evaluation
=======  =============  ========================  ======================================================================

The weights that each pass uses come from :mod:`petra.engine.weights`; a version of None means the current
parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from petra.engine.block_function import BlockFunction
from petra.engine.twin import TwinFunction
from petra.engine.weights import WeightVersion, WeightVersions, weight_versions
from petra.errors import ModelError
from petra.method import Keep, Weights
from petra.reversible import Gradients, Grid
from petra.reversible.replay import NOTHING
from petra.specs import Streams, detached, in_own_memory
from petra.torch_private import vector_jacobian_products

Fetch = Callable[[int], Streams]
"""Function of a microbatch that returns the input of the model's first block."""
RECOMPUTES = (
    "activation checkpointing and other saved-tensor hooks inside a block can't be used with method.keep=graph and "
    "method.weights=current where updates come between forward and backward: the recomputation would use newer weights; use "
    "method.keep=input or method.weights=stashed"
)

HOOKS_BESIDE = (
    "activation checkpointing and other saved-tensor hooks inside a block can't be used with trainer.overlap on the CPU if the "
    "block stores its graph or draws random numbers: they could run the block in two threads at once"
)


@dataclass
class Stored:
    """Activations that a block stores for one microbatch between its forward and its backward pass."""

    inputs: Streams
    outputs: Streams = ()
    """Outputs with their graph; empty unless the block keeps its graph."""

    def bytes(self) -> int:
        """Return the size of the inputs, without what autograd saves in a graph."""
        return sum(t.nbytes for t in self.inputs)


class BlockRunner(ABC):
    """One block with its state between passes. Subclasses differ in what they store in the forward pass.

    Args:
        function: The block as a function of input, weights and microbatch.
        versions: The versions of its weights.
        input_needs_gradient: False for the first block of the model, which takes the data.
        overwritten: Whether updates may overwrite the weights between the passes of a microbatch.
        beside: Whether forwards run in one thread while backwards run in another.

    Attributes:
        parameters: Trained parameters by name.
        forward_function: The function that forwards evaluate, ``function`` unless :meth:`prepare_training` copies the block.
        stored: Stored activations of each microbatch in flight.
    """

    keep: ClassVar[Keep]

    def __init__(
        self,
        function: BlockFunction,
        versions: WeightVersions,
        *,
        input_needs_gradient: bool,
        overwritten: bool = False,
        beside: bool = False,
    ) -> None:
        self.function, self.versions, self.parameters = function, versions, function.parameters
        self.forward_function = function
        self.stored: dict[int, Stored] = {}
        self._trained = tuple(self.parameters.values())
        self._input_needs_gradient, self._overwritten, self._beside = input_needs_gradient, overwritten, beside

    def prepare_training(self) -> None:
        """Copy the block for forwards, in its present mode, if backwards run at the same time in another thread."""
        if self._beside:
            self.forward_function = TwinFunction(self.function)

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

    def begin_update(self) -> None:
        """Prepare for an optimizer step."""
        self.versions.before_update()
        for function in {self.function, self.forward_function}:
            function.begin_update()

    def replay(self, m: int, x: Streams, version: WeightVersion | None) -> Streams:
        """Run the forward pass of microbatch ``m`` again; nothing is stored or updated."""
        with self.function.frozen_statistics():
            return self.function(m, x, version)

    def _choose_version(self, m: int) -> WeightVersion | None:
        """Return the weights for the forward pass of microbatch ``m``, and stash them if the backward pass needs them too."""
        version = self.versions.for_forward(m)
        self.versions.stash(m, version)
        return version

    def _forward_with_graph(self, m: int, x: Streams, version: WeightVersion | None) -> Stored:
        inputs = tuple(t.detach().requires_grad_(self._input_needs_gradient and t.is_floating_point()) for t in x)
        try:
            with torch.enable_grad():
                return Stored(inputs, self.function(m, inputs, version))
        except RuntimeError as error:
            if "in-place operation" in str(error):  # autograd refuses to change a leaf before the function can see a change
                with torch.no_grad(), self.function.frozen_statistics():
                    self.function(m, tuple(t.detach().clone() for t in x), version)
            raise

    def _recomputing(self) -> AbstractContextManager[None]:
        """Return the context of an evaluation of the block in a backward pass."""
        forbidden = self._beside and self.function.draws is not False
        return _without_hooks(self.function.module, HOOKS_BESIDE) if forbidden else NOTHING

    def _differentiate(self, stored: Stored, dy: Streams, version: WeightVersion | None) -> tuple[Streams, Streams, Gradients]:
        weights: Sequence[Tensor] = self._trained if version is None else [version[name] for name in self.parameters]
        connected = [(y, d) for y, d in zip(stored.outputs, dy, strict=True) if y.requires_grad]
        if not connected:  # no output depends on the input or a weight
            return detached(stored.inputs), tuple(torch.zeros_like(t) for t in stored.inputs if t.requires_grad), {}
        inputs = [t for t in stored.inputs if t.requires_grad]
        outputs, gradients = zip(*connected, strict=True)
        # Activation checkpointing inside the block reads the parameters again.
        with NOTHING if self._beside and self.keep is Keep.GRAPH else self.function.using(version):
            found = vector_jacobian_products(outputs, [*inputs, *weights], gradients)
        dx = tuple([torch.zeros_like(t) if d is None else d for t, d in zip(inputs, found, strict=False)])
        of_parameters = {p: g for p, g in zip(self._trained, found[len(inputs) :], strict=True) if g is not None}
        return detached(stored.inputs), dx, of_parameters


class KeepGraph(BlockRunner):
    """Evaluates the block once, and stores its autograd graph."""

    keep = Keep.GRAPH

    def prepare_training(self) -> None:
        """Do nothing: backwards don't evaluate the block, so forwards need no copy."""

    def forward(self, m: int, x: Streams) -> Streams:
        version = self._choose_version(m)
        with _without_hooks(self.function.module, RECOMPUTES if self._overwritten else HOOKS_BESIDE if self._beside else None):
            self.stored[m] = self._forward_with_graph(m, x, version)
        return detached(self.stored[m].outputs)

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        return self._differentiate(self.stored.pop(m), dy, self.versions.for_backward(m))


class Recompute(BlockRunner):
    """Stores the block's input, and evaluates the block again in the backward pass, which alone updates running statistics."""

    keep = Keep.INPUT

    def forward(self, m: int, x: Streams) -> Streams:
        version = self._choose_version(m)
        with self.forward_function.first_evaluation():
            y = self.forward_function(m, x, version)
        self._keep_input(m, x)
        return y

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        version = self.versions.for_backward(m)
        with self._recomputing():
            recomputed = self._forward_with_graph(m, self._take_input(m), version)
        return self._differentiate(recomputed, dy, version)

    def _keep_input(self, m: int, x: Streams) -> None:
        self.stored[m] = Stored(tuple(in_own_memory(t) for t in x))

    def _take_input(self, m: int) -> Streams:
        return self.stored.pop(m).inputs


class Refetch(Recompute):
    """Stores nothing, and fetches the input again: the first block of a model, whose input is the data."""

    keep = Keep.REFETCH
    fetch: Fetch | None = None
    """Returns the input of a microbatch. None in a stage that runs no backward pass."""

    def _keep_input(self, m: int, x: Streams) -> None:
        pass

    def _take_input(self, m: int) -> Streams:
        assert self.fetch is not None
        return self.fetch(m)


class Reconstruct(BlockRunner):
    """Stores nothing, and computes a reversible block's input from its output in the backward pass, which alone updates
    running statistics."""

    keep = Keep.NOTHING

    def forward(self, m: int, x: Streams) -> Streams:
        version = self._choose_version(m)
        with self.forward_function.first_evaluation():
            return self.forward_function(m, x, version)

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        version = self.versions.for_backward(m)
        with self._recomputing():
            if version is None or not self.versions.reconstructs_with_current:
                return self.function.inverse_vjp(m, y, dy, version)
            # Reconstruct with the current parameters, but compute the gradient at the stashed version.
            recomputed = self._forward_with_graph(m, self.function.inverse(m, y), version)
        return self._differentiate(recomputed, dy, version)


def block_runner(
    module: nn.Module,
    keep: Keep,
    *,
    weights: Weights,
    k: int,
    seed: int,
    input_needs_gradient: bool,
    autocast: torch.dtype | None,
    stale: bool = False,
    beside: bool = False,
    grid: Grid | None = None,
    fetch: Fetch | None = None,
    cast_once: bool = False,
) -> BlockRunner:
    """Return the runner of a block.

    Args:
        module: The block, on its device and in training mode.
        keep: What the block stores between its passes.
        weights: Which weights the backward pass differentiates.
        k: Microbatches per update.
        seed: Seed of this block in this run.
        input_needs_gradient: False for the first block of the model, which takes the data.
        autocast: Type in which the block computes, or None.
        stale: Whether updates may come between the passes of a microbatch.
        beside: Whether forwards run in one thread while backwards run in another.
        grid: Grid for exact streams, or None.
        fetch: Returns the block's input for a microbatch again; for ``Keep.REFETCH``.
        cast_once: As for :class:`petra.engine.block_function.BlockFunction`.
    """
    kinds: dict[Keep, type[BlockRunner]] = {kind.keep: kind for kind in (KeepGraph, Recompute, Refetch, Reconstruct)}
    function = BlockFunction(module, seed=seed, autocast=autocast, grid=grid, cast_once=cast_once)
    versions = weight_versions(function.parameters, weights, keeps_graph=keep is Keep.GRAPH, k=k)
    runner = kinds[keep](
        function,
        versions,
        input_needs_gradient=input_needs_gradient,
        overwritten=stale and weights is Weights.CURRENT,
        beside=beside,
    )
    if isinstance(runner, Refetch):
        runner.fetch = fetch
    return runner


@contextmanager
def _without_hooks(module: nn.Module, reason: str | None) -> Iterator[None]:
    """Forbid saved-tensor hooks inside the ``with`` block, unless ``reason`` is None.

    Raises:
        ModelError: If the body sets such hooks. The message contains the reason.
    """
    if reason is None:
        yield
        return
    try:
        with ExitStack() as stack:
            with suppress(RuntimeError):  # a measurement outside of the block has hooks of its own
                stack.enter_context(disable_saved_tensors_hooks(reason))
            yield
    except RuntimeError as error:
        if str(error) != reason:
            raise
        raise ModelError(f"{type(module).__name__}: {reason}") from error
