"""Bytes that stages hold between F and B, counted by storage: inputs, outputs, stashed weights, and what graphs saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from petra.diagnostics.replacing import replace_method
from petra.engine.stage import Stage
from petra.method import Keep, Weights
from petra.model import Model
from petra.specs import TensorSpec


class GraphMeter:
    """Watches what graphs refer to while :meth:`watching` is open; those made before are not seen.

    Attributes:
        peak: the most bytes referred to at once, without those of ``excluded`` tensors.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self.peak = self._bytes = 0
        self._excluded = {_key(tensor) for tensor in excluded}
        self._references: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    @contextmanager
    def watching(self) -> Iterator[GraphMeter]:
        with saved_tensors_hooks(lambda tensor: _Saved(tensor, self), _Saved.tensor):
            yield self

    def storages(self) -> dict[int, int]:
        """Bytes of each storage that graphs refer to now; one counts once however many tensors share it."""
        return {key: self._sizes[key] for key, references in self._references.items() if references}

    def _refer(self, key: int, change: int) -> None:
        before, after = self._references[key], self._references[key] + change
        self._references[key] = after
        if not (before and after) and key not in self._excluded:
            self._bytes += change * self._sizes[key]
            self.peak = max(self.peak, self._bytes)


class HeldMeter:
    """Watches one stage while :meth:`watching` is open; graphs made before are not seen.

    Attributes:
        peak: the most bytes held at the end of a forward so far.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage, self.peak = stage, 0
        self._graphs = GraphMeter()

    @contextmanager
    def watching(self) -> Iterator[HeldMeter]:
        """Replaces the stage's ``forward`` by one that also counts; results are the same."""
        forward = self.stage.forward

        def counted(m: int, x: Any) -> Any:
            with self._graphs.watching():
                y = forward(m, x)
            self.peak = max(self.peak, self.bytes())
            return y

        with ExitStack() as undo:
            replace_method(undo, self.stage, "forward", counted)
            yield self

    def bytes(self, *, weights: bool = True) -> int:
        """Held now. A storage counts once; parameters and buffers don't, and without ``weights`` copies of them don't either."""
        sizes = self._graphs.storages()
        own = {_key(tensor) for tensor in (*self.stage.module.parameters(), *self.stage.module.buffers())}
        for runner in self.stage.runners:
            activations = [t for stored in runner.stored.values() for t in (*stored.inputs, *stored.outputs)]
            copies = [t for version in runner.versions.stashed.values() for t in (version or {}).values()]
            for tensor in (*activations, *copies):
                sizes[_key(tensor)] = tensor.untyped_storage().nbytes()
            if not weights:
                own |= {_key(tensor) for tensor in copies}
        return sum(size for key, size in sizes.items() if key not in own)


class _Saved:
    """What a graph refers to instead of a tensor that it saved; it goes when the graph goes."""

    def __init__(self, tensor: Tensor, meter: GraphMeter) -> None:
        self._tensor, self._meter, self._key = tensor, meter, _key(tensor)
        meter._sizes[self._key] = tensor.untyped_storage().nbytes()
        meter._refer(self._key, 1)

    def tensor(self) -> Tensor:
        return self._tensor

    def __del__(self) -> None:
        self._meter._refer(self._key, -1)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def graph_bytes(
    model: Model,
    blocks: range,
    inputs: Sequence[TensorSpec],
    keeps: Sequence[Keep],
    *,
    weights: Weights = Weights.CURRENT,
    autocast: torch.dtype | None = None,
) -> int:
    """Bytes that a stage of these blocks holds of one microbatch, from tensors without data: no memory, no compute."""
    with torch.device("meta"):
        modules = [model.blocks[b].build().train() for b in blocks]
    with FakeTensorMode():
        for module in modules:
            _fake(module)
        stage = Stage(modules, keeps, weights=weights, first_block=blocks.start, autocast=autocast)
        x = tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in inputs)
        with HeldMeter(stage).watching() as meter:
            stage.forward(0, x)
        return meter.bytes()


def _fake(module: nn.Module) -> None:
    """Puts tensors without data on the CPU, where autocast applies, in the place of those on the meta device."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    fake = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                    tensors[name] = made.setdefault(id(tensor), fake)  # type: ignore[assignment]
