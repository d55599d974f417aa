"""Graphs that blocks store while updates change the weights that these graphs refer to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from petra.engine.block_function import Around
from petra.errors import ModelError
from petra.reversible.replay import NOTHING

RECOMPUTES = (
    "activation checkpointing and other saved-tensor hooks inside a block can't be used with method.keep=graph and "
    "method.weights=current where updates come between forward and backward: the recomputation would use newer weights; use "
    "method.keep=input or method.weights=stashed"
)


class ForbidRecomputation(Around):
    """Forbids saved-tensor hooks inside a block.

    Raises:
        ModelError: If an evaluation in training sets such hooks.
    """

    def __init__(self, block: nn.Module) -> None:
        self._name = type(block).__name__

    def context(self, x: Tensor, *, training: bool) -> AbstractContextManager[object]:
        return self._without_hooks() if training else NOTHING

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        try:
            with ExitStack() as stack:
                with suppress(RuntimeError):  # a measurement outside of the block has hooks of its own
                    stack.enter_context(disable_saved_tensors_hooks(RECOMPUTES))
                yield
        except RuntimeError as error:
            if str(error) != RECOMPUTES:
                raise
            raise ModelError(f"{self._name}: {RECOMPUTES}") from error
