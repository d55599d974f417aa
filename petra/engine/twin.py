"""Copies of blocks for forwards that run beside backwards in another thread."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from petra.engine.block_function import BlockFunction
from petra.engine.weights import WeightVersion
from petra.errors import ModelError
from petra.specs import Streams
from petra.torch_private import version

Marks = Sequence[tuple[str, int, int | None]]


class TwinFunction(BlockFunction):
    """The function of a block's :func:`twin`, for forwards in one thread while the block runs backwards in another.

    Raises:
        ModelError: If the block can't be copied, or changes its buffers in its first call: a backward may use them.
    """

    def __init__(self, function: BlockFunction) -> None:
        super().__init__(twin(function.module), seed=function.seed, autocast=function.autocast, cast_once=function.cast_once)
        self._function = function
        self._called = False

    def __call__(self, m: int, x: Streams, version: WeightVersion | None) -> Streams:
        if self._called:
            return super().__call__(m, x, version)
        before = buffer_marks(self.module)
        y = super().__call__(m, x, version)
        require_unchanged(self.module, before)
        self._function.draws = self.draws
        self._called = True
        return y


def twin(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters share the memory of the module's, and whose buffers are the module's own.

    A forward of the copy reads what an optimizer step has written to the module. Attributes of the two are independent: replacing
    a parameter's ``data`` or disabling the updates of running statistics in one of them does not affect the other.

    Raises:
        ModelError: If the module can't be copied.
    """
    memo: dict[int, object] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    memo |= {id(buffer): buffer for buffer in module.buffers()}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ModelError(
            f"trainer.overlap: {type(module).__name__} can't be copied for forwards beside backwards: {error}"
        ) from error


def buffer_marks(module: nn.Module) -> Marks:
    """Return what changes if a buffer of the module is replaced or written."""
    return [(name, id(buffer), version(buffer)) for name, buffer in _buffers(module)]


def require_unchanged(module: nn.Module, before: Marks) -> None:
    """Check that no buffer has changed since :func:`buffer_marks`: a backward beside the forward may use it.

    Raises:
        ModelError: If one has.
    """
    for (name, *old), (_, *new) in zip(before, buffer_marks(module), strict=True):
        if old != new:
            raise ModelError(
                f"trainer.overlap: {type(module).__name__} changes its buffer {name} in the forward pass; use trainer.overlap=false"
            )


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers())
