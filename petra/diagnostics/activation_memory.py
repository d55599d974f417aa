"""Counts the bytes that a stage stores between forward and backward, and the bytes of all tensors while they live."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from petra.engine.options.simple_stage import simple_stage
from petra.engine.stage import Stage
from petra.hooks import Hook, Hooks
from petra.method import Keep, Weights
from petra.model import Model
from petra.settings import Numerics
from petra.specs import Streams, TensorSpec
from petra.torch_private import DEVICE, TorchDispatchMode, fake_tensor_mode, storage_key, tree_leaves

BLOCK = 512
"""Sizes of tensors are rounded up to a multiple of this number of bytes, as torch's CUDA allocator does."""
CPU = torch.device("cpu")


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
    """Return the bytes that a stage stores now. A storage counts once; parameters and buffers don't count.

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
    return sum(size for key, size in sizes.items() if key not in excluded)


def graph_bytes(
    model: Model,
    blocks: range,
    inputs: Sequence[TensorSpec],
    keeps: Sequence[Keep],
    *,
    weights: Weights = Weights.CURRENT,
    autocast: torch.dtype | None = None,
) -> int:
    """Return the bytes that a stage of these blocks stores for one microbatch.

    The forward runs on fake tensors and needs neither memory nor compute.
    """
    with torch.device("meta"):
        modules = [model.blocks[b].build().train() for b in blocks]
    with fake_tensor_mode():
        for module in modules:
            fake_module(module)
        stage = simple_stage(modules, keeps, weights=weights, first_block=blocks.start, numerics=Numerics(autocast))
        x = tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in inputs)
        with GraphMeter().counting() as graphs:
            stage.forward(0, x)
        return stored_bytes(stage, graphs)


def fake_module(module: nn.Module) -> None:
    """Replace a module's tensors on the meta device by fake tensors on the CPU, where autocast applies."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        parameters = [*part.named_parameters(recurse=False, remove_duplicate=False)]
        buffers = [*part.named_buffers(recurse=False, remove_duplicate=False)]
        for name, tensor in (*parameters, *buffers):
            fake = torch.empty(tensor.shape, dtype=tensor.dtype)
            fake = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
            setattr(part, name, made.setdefault(id(tensor), fake))


def rounded(size: int) -> int:
    """Return the bytes that the allocator takes for a tensor of ``size`` bytes."""
    return -(-size // BLOCK) * BLOCK


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations inside the ``with`` block create, while they live.

    Attributes:
        now: Bytes that live now.
        owner: Stage that runs, which new storages count for.
        own: Bytes that live now, by the stage that they count for.
        peaks: Most bytes that lived at a time, of all stages, by the stage that ran.
        most: Most bytes that lived at a time since the caller last set it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.owner = self.most = 0
        self.own, self.peaks = Counter[int](), Counter[int]()
        self._seen: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._owners: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is DEVICE:
            return CPU  # of all tensors here; FakeTensorMode would take longer, and each operation asks several times
        if function.name().startswith("aten::_fused_") and not function._schema.returns:
            return None  # updates in place; FakeTensorMode would run the optimizer's kernel on real tensors
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return found

    def assign(self, tensors: Iterable[Tensor], owner: int) -> None:
        """Count the storages of tensors for another stage from now on."""
        for tensor in tensors:
            if (key := storage_key(tensor)) in self._seen:
                self.own[self._owners[key]] -= self._seen[key][1]
                self.own[owner] += self._seen[key][1]
                self._owners[key] = owner

    def count(self, more: int) -> None:
        """Count ``more`` bytes that live for a moment only."""
        self.most = max(self.most, self.now + more)
        self.peaks[self.owner] = max(self.peaks[self.owner], self.now + more)

    def _add(self, tensor: Tensor) -> None:
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key in self._seen:
            return

        def freed(_: object) -> None:
            del self._seen[key]
            self.now -= size
            self.own[self._owners.pop(key)] -= size

        size = rounded(storage.nbytes())
        self._seen[key], self._owners[key] = (weakref.ref(storage, freed), size), self.owner
        self.now += size
        self.own[self.owner] += size
        self.count(0)
