"""Memory of one block: what its passes and its update allocate, counted by running them on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from petra.diagnostics.activation_memory import rounded
from petra.engine.build import make_stage
from petra.method import Keep, Weights
from petra.model import Model
from petra.settings import Numerics
from petra.specs import Streams, TensorSpec
from petra.torch_private import DEVICE, TorchDispatchMode, fake_tensor_mode, storage_key, tree_leaves

BuildOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Make = Callable[[], Streams]
"""Returns tensors without data."""
Known = dict[Hashable, Any]
"""What has been counted, by what it depends on. Plans with the same model, inputs, number formats and recipe may share it."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one block.

    Attributes:
        weights: Parameters and buffers.
        gradients: Gradients of the trained parameters; also the size of one version of the weights.
        optimizer: States of the optimizer.
        casts: Copies of weights that live until the update: those that graphs of stashed weights refer to.
        stored: What a forward leaves for its backward, its input and output included if they are stored.
        output: Its output.
        made: What its output adds to its input and to what is stored.
        returned: What the input and its gradient, which a backward returns, add to the output and its gradient.
        forward: Most that a forward adds for a moment to its input and to what existed before.
        backward: Most that a backward adds for a moment to the output and its gradient, and to what existed before.
        update: Most that an update adds for a moment.
    """

    weights: int
    gradients: int
    optimizer: int
    casts: int
    stored: int
    output: int
    made: int
    returned: int
    forward: int
    backward: int
    update: int


def count_block(
    model: Model,
    block: int,
    inputs: Sequence[TensorSpec],
    keep: Keep,
    weights: Weights = Weights.CURRENT,
    numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
    optimizer: BuildOptimizer | None = None,
    known: Known | None = None,
) -> BlockMemory:
    """Count the memory of a block. Blocks of the same kind are counted once. Needs neither a GPU nor the memory that it counts.

    Args:
        block: Index of the block in the model.
        inputs: Form of its input.
        keep: What it stores between forward and backward.
        weights: Which weights its backward differentiates.
        optimizer: Builds the optimizer of a module; None if it does not count.
        known: Blocks that have been counted, to which this call adds its own.

    Raises:
        PetraError: If this torch has no FakeTensorMode.
    """
    known = {} if known is None else known
    key = (model.blocks[block].kind, block == 0, tuple(inputs), keep, weights, optimizer is None)
    if key not in known:
        with torch.device("meta"):
            module = model.blocks[block].build().train()
        with fake_tensor_mode(), LiveBytes() as live:
            _fake_module(module, numerics.channels_last)
            make = partial(empty, inputs, numerics.channels_last)
            known[key] = _count(module, keep, weights, numerics, optimizer, make, live, first=block == 0)
    return known[key]  # type: ignore[no-any-return]


def _count(
    module: nn.Module,
    keep: Keep,
    weights: Weights,
    numerics: Numerics,
    optimizer: BuildOptimizer | None,
    make: Make,
    live: LiveBytes,
    *,
    first: bool,
) -> BlockMemory:
    """Count passes that come after others: the first ones make copies of the weights."""
    stage = make_stage([module], [keep], first_block=1 - first, weights=weights, numerics=numerics, fetch=lambda m: make())
    parameters, begin = [*module.parameters()], live.now
    like = _like(stage.forward(0, make()))
    stage.backward(0, like(), like())
    casts = live.now - begin
    stage.forward(1, make())
    before = live.now
    x = make()
    given = live.most = live.now
    y = stage.forward(2, x)
    forward, held = live.most - given, live.now
    output = sum(rounded(size) for size in {storage_key(t): t.untyped_storage().nbytes() for t in y}.values())
    del y
    made = held - live.now
    del x
    stored = live.now - before
    if weights is not Weights.CURRENT:
        with stage.updating():
            pass
    y, dy = like(), like()
    before = live.most = live.now
    returned = stage.backward(2, y, dy)
    backward, left = live.most - before, live.now - before
    del returned, y, dy
    states, update = (0, 0) if optimizer is None or not stage.gradients.parameters else _count_update(optimizer(stage.module), live)
    return BlockMemory(
        weights=sum(rounded(t.nbytes) for t in (*parameters, *module.buffers())),
        gradients=sum(rounded(p.nbytes) for p in parameters if p.requires_grad),
        optimizer=states,
        casts=casts,
        stored=stored,
        output=output,
        made=made,
        returned=left + stored,
        forward=forward,
        backward=backward,
        update=update,
    )


def _count_update(optimizer: torch.optim.Optimizer, live: LiveBytes) -> tuple[int, int]:
    """Return the bytes of the optimizer's states, and the most that its second step adds for a moment."""
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    before = live.most = live.now
    optimizer.step()
    return sum(rounded(t.nbytes) for t in tensors), live.most - before


def _like(streams: Streams) -> Make:
    """Return a function that makes tensors of the same forms."""
    forms = [(t.shape, t.stride(), t.dtype) for t in streams]
    return lambda: tuple(torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in forms)


def empty(specs: Sequence[TensorSpec], channels_last: bool = False) -> Streams:
    """Return uninitialized tensors of these forms."""
    formats = (torch.channels_last if channels_last and len(spec.shape) == 4 else torch.contiguous_format for spec in specs)
    return tuple(torch.empty(s.shape, dtype=s.dtype, memory_format=f) for s, f in zip(specs, formats, strict=True))


def _fake_module(module: nn.Module, channels_last: bool) -> None:
    """Replace a module's tensors on the meta device by fake tensors on the CPU, where autocast applies."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        parameters = [*part.named_parameters(recurse=False, remove_duplicate=False)]
        buffers = [*part.named_buffers(recurse=False, remove_duplicate=False)]
        for name, tensor in (*parameters, *buffers):
            last = channels_last and tensor.dim() == 4
            fake = torch.empty(
                tensor.shape, dtype=tensor.dtype, memory_format=torch.channels_last if last else torch.contiguous_format
            )
            fake = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
            setattr(part, name, made.setdefault(id(tensor), fake))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations inside the ``with`` block create, while they live.

    Attributes:
        now: Bytes that live now.
        most: Most bytes that lived at a time since the caller last set it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is DEVICE:
            return CPU  # of all tensors here; FakeTensorMode would take longer, and each operation asks several times
        if function.name().startswith("aten::_fused_") and not function._schema.returns:
            return None  # updates in place; FakeTensorMode would run the optimizer's kernel on real tensors
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and storage_key(tensor) not in self._seen:
                self._add(storage_key(tensor), tensor.untyped_storage())
        return found

    def _add(self, key: int, storage: Any) -> None:
        def freed(_: object) -> None:
            del self._seen[key]
            self.now -= size

        size = rounded(storage.nbytes())
        self._seen[key] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)
