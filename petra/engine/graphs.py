"""The passes of a block as CUDA graphs: captured once, then replayed with one launch each.

A pass is captured after :data:`WARM_UP` microbatches, with input buffers of its own, on the memory pool of its stage and direction.
A replay copies the inputs into these buffers, launches the graph, and copies its results out: three launches. A result that is an
input unchanged, such as x2 of a coupling, is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from petra.errors import ModelError, first_line
from petra.reversible import LaterGradients
from petra.specs import Streams
from petra.torch_private import foreach_copy_

WARM_UP = 2
"""Microbatches that a pass runs without a graph. Libraries choose their algorithms and allocate their workspaces in them."""


class Pools(NamedTuple):
    """Memory pools of a stage's graphs. Graphs of one pool never run at the same time, and only their results outlive a replay."""

    forward: Any
    backward: Any

    @staticmethod
    def create() -> Pools:
        """Create the pools of a stage."""
        return Pools(torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle())


class BlockGraphs:
    """The graphs of one block, whose weights stay in the same memory.

    Args:
        module: The block, for messages.
        pools: Memory pools of the stage.
    """

    def __init__(self, module: nn.Module, pools: Pools) -> None:
        self._forward = _Pass(type(module).__name__, pools.forward)
        self._backward = _Pass(type(module).__name__, pools.backward)

    def forward(self, function: Callable[[Streams], Streams], x: Streams) -> Streams:
        """Return ``function(x)``. The function must run the same kernels each time, and keep no tensors."""
        return self._forward(lambda tensors: _Results(function(tensors), (), None), x).copied

    def backward(
        self, function: Callable[[Streams, Streams], tuple[Streams, Streams, LaterGradients]], x: Streams, dy: Streams
    ) -> tuple[Streams, Streams, LaterGradients]:
        """Return ``function(x, dy)``: an input, the gradient with respect to it, and those of the parameters.

        The next call overwrites the parameters' gradients.
        """

        def flat(tensors: Streams) -> _Results:
            inputs, gradient, later = function(tensors[: len(x)], tensors[len(x) :])
            own = later()
            return _Results((*inputs, *gradient), tuple(own.values()), (len(inputs), tuple(own)))

        copied, fixed, (inputs, parameters) = self._backward(flat, (*x, *dy))
        gradients = dict(zip(parameters, fixed, strict=True))
        return copied[:inputs], copied[inputs:], lambda: gradients


class _Results(NamedTuple):
    """Results of a pass.

    Attributes:
        copied: Results that are copied out of the graph's memory.
        fixed: Results that the next replay overwrites.
        facts: What else the function returned, the same for each microbatch.
    """

    copied: Streams
    fixed: tuple[Tensor, ...]
    facts: Any


class _Pass:
    """A function of tensors that becomes a CUDA graph."""

    def __init__(self, name: str, pool: Any) -> None:
        self._name, self._pool = name, pool
        self._calls = 0
        self._graph = torch.cuda.CUDAGraph()
        self._inputs: Streams = ()
        self._results = _Results((), (), None)
        self._sources: list[int | None] = []  # the input that each copied result is, if any

    def __call__(self, function: Callable[[Streams], _Results], tensors: Streams) -> _Results:
        self._calls += 1
        if self._calls <= WARM_UP:
            return function(tensors)
        if not self._inputs:
            self._capture(function, tensors)
        foreach_copy_(list(self._inputs), list(tensors))
        self._graph.replay()
        moved = [result for result, source in zip(self._results.copied, self._sources, strict=True) if source is None]
        copies = [torch.empty_like(result) for result in moved]
        if copies:
            foreach_copy_(copies, moved)
        fresh = iter(copies)
        copied = tuple(next(fresh) if source is None else tensors[source] for source in self._sources)
        return self._results._replace(copied=copied)

    def _capture(self, function: Callable[[Streams], _Results], tensors: Streams) -> None:
        """Capture the function. Nothing runs; the first replay does.

        Raises:
            ModelError: If the function can't be captured.
        """
        self._inputs = tuple(torch.empty_like(t) for t in tensors)
        try:
            # Other threads, such as NCCL's watchdog and the one that pins microbatches, may go on meanwhile.
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                self._results = function(self._inputs)
        except RuntimeError as error:
            raise ModelError(
                f"trainer.cuda_graphs: {self._name} can't be captured ({first_line(error)}); use trainer.cuda_graphs=false"
            ) from error
        self._sources = [_same(result, self._inputs) for result in self._results.copied]


def _same(result: Tensor, inputs: Sequence[Tensor]) -> int | None:
    """Return the index of the input that has the memory of a result, or None."""
    form = (result.data_ptr(), result.shape, result.stride(), result.dtype)
    for i, own in enumerate(inputs):
        if form == (own.data_ptr(), own.shape, own.stride(), own.dtype):
            return i
    return None
