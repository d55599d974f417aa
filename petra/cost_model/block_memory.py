"""Memory of the passes of one block, counted once for each kind of block, and repeated without its operations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.diagnostics.activation_memory import LiveBytes, rounded
from petra.engine.block_function import BlockFunction, WrappedFunction
from petra.engine.weights import WeightVersion
from petra.reversible import Gradients
from petra.specs import Streams
from petra.torch_private import storage_key, vector_jacobian_products

Known = dict[Hashable, Any]
"""What has been counted, by what it depends on."""


@dataclass(frozen=True)
class Pass:
    """What a pass of a block allocates.

    Attributes:
        peak: Most bytes that it needs at a time.
        left: Bytes that live after it besides its results: a graph.
        storages: Elements and type of each storage that it creates for its results.
        results: Of each result, the storage or the argument that it is a view of, with size, stride and offset; None without one.
    """

    peak: int
    left: int
    storages: Sequence[tuple[int, torch.dtype]]
    results: Sequence[tuple[bool, int, tuple[Any, ...]] | None]

    @staticmethod
    def of(live: LiveBytes, run: Callable[[], Sequence[Tensor | None]], arguments: Sequence[Tensor]) -> tuple[Pass, Any]:
        """Run a pass, and return what it has allocated, and its results."""
        before = live.most = live.now
        found = run()
        given = {storage_key(t): i for i, t in enumerate(arguments)}
        made: dict[int, int] = {}
        storages, results = [], list[tuple[bool, int, tuple[Any, ...]] | None]()
        for t in found:
            if t is None:
                results.append(None)
                continue
            key = storage_key(t)
            if key not in given and key not in made:
                made[key] = len(made)
                storages.append((t.untyped_storage().nbytes() // t.element_size(), t.dtype))
            place = given.get(key, made.get(key, 0))
            results.append((key in given, place, (t.shape, t.stride(), t.storage_offset())))
        left = live.now - before - sum(rounded(n * dtype.itemsize) for n, dtype in storages)
        return Pass(live.most - before, left, storages, results), found

    def repeat(self, live: LiveBytes, arguments: Sequence[Tensor]) -> list[Tensor | None]:
        """Count the pass again, and return results of the same form."""
        live.count(self.peak)
        made = [torch.empty(n, dtype=dtype) for n, dtype in self.storages]
        return [
            None if found is None else (arguments if found[0] else made)[found[1]].as_strided(*found[2]) for found in self.results
        ]


class Repeated(WrappedFunction):
    """Runs each pass of a kind of block once. Afterwards, only its memory is counted.

    Args:
        inner: The function of the block.
        kind: Blocks with the same kind have the same memory.
        live: Counts the bytes.
        known: Passes that have been counted.
    """

    def __init__(self, inner: BlockFunction, kind: Hashable, live: LiveBytes, known: Known) -> None:
        super().__init__(inner)
        self._kind, self._live, self._known = kind, live, known
        self._casts: Tensor | None = None

    def begin_update(self) -> None:
        self._casts = None

    def __call__(self, m: int, x: Streams, version: WeightVersion | None) -> Streams:
        if torch.is_grad_enabled():
            forward, backward = self._of("graph", x, version, lambda: self._with_graph(m, x, version))
            weights = (self.parameters if version is None else version).values()
            return _Graph.apply(self._live, forward, backward, len(x), *x, *weights)  # type: ignore[no-any-return, no-untyped-call]
        (found,) = self._of("forward", x, version, lambda: [Pass.of(self._live, lambda: self.inner(m, x, version), x)[0]])
        return tuple(found.repeat(self._live, x))

    def inverse_vjp(self, m: int, y: Streams, dy: Streams, version: WeightVersion | None) -> tuple[Streams, Streams, Gradients]:
        given = (*y, *dy)

        def run() -> list[Any]:
            names: list[str] = []

            def tensors() -> list[Tensor]:
                x, dx, gradients = self.inner.inverse_vjp(m, y, dy, version)
                names[:] = [name for name, p in self.parameters.items() if p in gradients]
                return [*x, *dx, *(gradients[self.parameters[name]] for name in names)]

            return [Pass.of(self._live, tensors, given)[0], names]

        found, names = self._of("inverse_vjp", given, version, run)
        tensors = found.repeat(self._live, given)
        x, dx, gradients = tensors[: len(y)], tensors[len(y) : -len(names) or None], tensors[len(tensors) - len(names) :]
        return tuple(x), tuple(dx), {self.parameters[name]: g for name, g in zip(names, gradients, strict=True)}

    def _with_graph(self, m: int, x: Streams, version: WeightVersion | None) -> list[Pass]:
        """Return what an evaluation with a graph, and its differentiation, allocate."""
        weights = (self.parameters if version is None else version).values()
        forward, y = Pass.of(self._live, lambda: self.inner(m, x, version), x)
        inputs, outputs = [*(t for t in x if t.requires_grad), *weights], [t for t in y if t.requires_grad]
        dy = [torch.empty_like(t) for t in y]
        deltas = [d for t, d in zip(y, dy, strict=True) if t.requires_grad]
        backward = Pass.of(self._live, lambda: vector_jacobian_products(outputs, inputs, deltas), dy)[0]
        results = iter(backward.results)
        every = [*(next(results) if t.requires_grad else None for t in x), *results]
        return [forward, Pass(backward.peak, 0, backward.storages, every)]

    def _of(self, name: str, given: Streams, version: WeightVersion | None, run: Callable[[], list[Any]]) -> list[Any]:
        """Return what a pass allocates, which ``run`` finds out the first time, and let the casts of the weights live."""
        places = [storage_key(t) for t in given]
        forms = tuple(
            (t.shape, t.stride(), t.dtype, t.requires_grad, t.storage_offset(), places.index(place))
            for t, place in zip(given, places, strict=True)
        )
        key = (self._kind, name, version is None, forms)
        if key not in self._known:
            peaks, before = self._live.peaks.copy(), self._live.now
            run()  # finds which weights are cast once per update
            run()
            casts = self._live.now - before
            self._known[key] = run(), casts
            self.inner.begin_update()
            self._live.peaks = peaks
        found, casts = self._known[key]
        if casts and self._casts is None:
            self._casts = torch.empty(casts, dtype=torch.uint8)
        return found  # type: ignore[no-any-return]


class _Graph(torch.autograd.Function):
    """Stands for the graph of a block."""

    @staticmethod
    def forward(ctx: Any, live: LiveBytes, forward: Pass, backward: Pass, count: int, *tensors: Tensor) -> Any:
        ctx.live, ctx.backward_pass = live, backward
        found = tuple(forward.repeat(live, tensors[:count]))
        ctx.graph = torch.empty(max(forward.left, 0), dtype=torch.uint8)
        return found

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        live: LiveBytes = ctx.live
        live.count(ctx.backward_pass.peak)
        ctx.graph = None
        return (None, None, None, None, *ctx.backward_pass.repeat(live, dy))
