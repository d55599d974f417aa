"""Measures the bytes that stages store between forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import itemgetter

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from petra.diagnostics.process_memory import rounded
from petra.engine.endpoints import DataSource
from petra.engine.stage import Stage
from petra.hooks import Hook
from petra.pipeline import Pipeline
from petra.specs import Streams
from petra.torch_private import storage_key


class GraphMeter:
    """Count the bytes of the tensors that autograd graphs refer to. Only graphs built inside :meth:`counting` are seen.

    Args:
        excluded: Tensors of any shapes that don't count.

    Attributes:
        peak: The largest number of bytes referred to at once.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self.peak = self._bytes = 0
        self._excluded = {storage_key(tensor) for tensor in excluded}
        self._storages: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()

    @contextmanager
    def counting(self) -> Iterator[GraphMeter]:
        """Count what graphs built inside the ``with`` block refer to, for as long as the graphs live."""
        with saved_tensors_hooks(self._save, itemgetter(0)):
            yield self

    def storages(self) -> dict[int, int]:
        """Return the bytes of each storage that graphs refer to now. A storage that several tensors share counts once."""
        return {key: storage.size for key, storage in self._storages.items()}

    def _save(self, tensor: Tensor) -> tuple[Tensor, _Storage]:
        key, size = storage_key(tensor), tensor.untyped_storage().nbytes()
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _Storage(size)
            if key not in self._excluded:
                self._add(size)
                weakref.finalize(storage, self._add, -size)
        return tensor, storage

    def _add(self, size: int) -> None:
        self._bytes += size
        self.peak = max(self.peak, self._bytes)


class _Storage:
    """A storage, for as long as graphs refer to it."""

    def __init__(self, size: int) -> None:
        self.size = size


class ActivationMemory(Hook):
    """Measure the bytes that each stage of this process stores. Attach with :meth:`attached`.

    Args:
        weights: Whether copies of the weights count.

    Attributes:
        peaks: The largest number of bytes stored at the end of a forward, by stage from 0.
    """

    def __init__(self, pipeline: Pipeline, *, weights: bool = True) -> None:
        self.pipeline, self.weights, self.peaks = pipeline, weights, dict.fromkeys(pipeline.stages, 0)
        self._graphs, self._forward = {j: GraphMeter() for j in pipeline.stages}, ExitStack()

    @contextmanager
    def attached(self) -> Iterator[ActivationMemory]:
        """Measure inside the ``with`` block. Also ends the counting of a forward that an exception interrupts."""
        with self.pipeline.hooks.attached(self), self._forward:
            yield self

    def forward_begin(self, stage: int, m: int, x: Streams) -> None:
        self._forward.enter_context(self._graphs[stage].counting())

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        self._forward.close()
        stored = stored_bytes(self.pipeline.stages[stage], self._graphs[stage], weights=self.weights)
        self.peaks[stage] = max(self.peaks[stage], stored)


def stored_bytes(stage: Stage, graphs: GraphMeter, *, weights: bool = True) -> int:
    """Return the bytes that a stage stores now, each storage once and :func:`rounded`. Parameters and buffers don't count.

    Args:
        graphs: Has counted the stage's forwards.
        weights: Whether copies of the weights count.
    """
    sizes = graphs.storages()
    excluded = {storage_key(tensor) for tensor in (*stage.module.parameters(), *stage.module.buffers())}
    for runner in stage.runners:
        activations = [t for stored in runner.stored.values() for t in (*stored.inputs, *stored.outputs)]
        copies = [t for version in runner.versions.stashed.values() for t in (version or {}).values()]
        for tensor in (*activations, *copies):
            sizes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        if not weights:
            excluded |= {storage_key(tensor) for tensor in copies}
    return sum(rounded(size) for key, size in sizes.items() if key not in excluded)


def measured(pipeline: Pipeline, data: DataSource, microbatches: int) -> list[int]:
    """Train, and return for each stage of this process the largest number of bytes stored between forward and backward."""
    with ActivationMemory(pipeline).attached() as memory:
        pipeline.train(data, microbatches)
    return [*memory.peaks.values()]
