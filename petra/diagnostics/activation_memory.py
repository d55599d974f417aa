"""Measures the bytes that stages store between forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from petra.engine.endpoints import DataSource
from petra.engine.stage import Stage
from petra.hooks import Hook, Hooks
from petra.pipeline import Pipeline
from petra.specs import Streams
from petra.torch_private import storage_key

BLOCK = 512
"""Sizes of tensors are rounded up to a multiple of this number of bytes, as torch's CUDA allocator does."""


class GraphMeter:
    """Count the bytes of the tensors that autograd graphs refer to. Only graphs built inside :meth:`counting` are seen.

    Args:
        excluded: Tensors that don't count.

    Attributes:
        peak: The largest number of bytes referred to at once.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self.peak = self._bytes = 0
        self._excluded = {storage_key(tensor) for tensor in excluded}
        self._references: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    @contextmanager
    def counting(self) -> Iterator[GraphMeter]:
        """Count what graphs built inside the ``with`` block refer to, for as long as the graphs live."""
        with saved_tensors_hooks(lambda tensor: _Saved(tensor, self), _Saved.tensor):
            yield self

    def storages(self) -> dict[int, int]:
        """Return the bytes of each storage that graphs refer to now. A storage that several tensors share counts once."""
        return {key: self._sizes[key] for key, references in self._references.items() if references}

    def add(self, key: int, size: int) -> None:
        """Count one more reference to a storage of ``size`` bytes."""
        self._sizes[key] = size
        self._references[key] += 1
        if self._references[key] == 1 and key not in self._excluded:
            self._bytes += size
            self.peak = max(self.peak, self._bytes)

    def remove(self, key: int) -> None:
        """Count one reference less."""
        self._references[key] -= 1
        if not self._references[key] and key not in self._excluded:
            self._bytes -= self._sizes[key]


class _Saved:
    """Stands for a tensor that a graph saved, and is destroyed with the graph."""

    def __init__(self, tensor: Tensor, meter: GraphMeter) -> None:
        self._tensor, self._meter, self._key = tensor, meter, storage_key(tensor)
        meter.add(self._key, tensor.untyped_storage().nbytes())

    def tensor(self) -> Tensor:
        return self._tensor

    def __del__(self) -> None:
        self._meter.remove(self._key)


class ActivationMemory(Hook):
    """Measure the bytes that one stage stores. Attach with :meth:`attached`.

    Args:
        index: Number of the stage, from 0.
        stage: The stage.
        weights: Whether copies of the weights count.

    Attributes:
        peak: The largest number of bytes stored at the end of a forward.
    """

    def __init__(self, index: int, stage: Stage, *, weights: bool = True) -> None:
        self.index, self.stage, self.weights, self.peak = index, stage, weights, 0
        self._graphs, self._forward = GraphMeter(), ExitStack()

    @contextmanager
    def attached(self, hooks: Hooks) -> Iterator[ActivationMemory]:
        """Measure inside the ``with`` block. Also ends the counting of a forward that an exception interrupts."""
        with hooks.attached(self), self._forward:
            yield self

    def forward_begin(self, stage: int, m: int, x: Streams) -> None:
        if stage == self.index:
            self._forward.enter_context(self._graphs.counting())

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        if stage == self.index:
            self._forward.close()
            self.peak = max(self.peak, stored_bytes(self.stage, self._graphs, weights=self.weights))


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


def rounded(size: int) -> int:
    """Return the bytes that the allocator takes for a tensor of ``size`` bytes."""
    return -(-size // BLOCK) * BLOCK


def measured(pipeline: Pipeline, data: DataSource, microbatches: int) -> list[int]:
    """Train, and return for each stage of this process the largest number of bytes stored between forward and backward."""
    with ExitStack() as stack:
        meters = [stack.enter_context(ActivationMemory(j, stage).attached(pipeline.hooks)) for j, stage in pipeline.stages.items()]
        pipeline.train(data, microbatches)
        return [meter.peak for meter in meters]
