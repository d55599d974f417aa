"""Notice a tensor that one block computes and another one reads, other than as a stream: no gradient comes back through it."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from petra.errors import ModelError, invalid
from petra.specs import Streams
from petra.torch_private import TorchDispatchMode, tree_leaves

Owner = tuple[int, str]
"""Pipeline and name of a block."""
_made: dict[int, tuple[ref[Tensor], Owner]] = {}
"""Tensors that blocks have computed from inputs and parameters, by identity."""


class watch_reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Check which tensors of other blocks a block reads in the ``with`` block. Takes several microseconds per operation.

    Tensors that carry no gradient in plain PyTorch either may be read: constants, integers, and what ``detach`` returns.

    Args:
        pipeline: Number of the pipeline that the block belongs to.
        name: Name of the block.
        x: Its input.

    Raises:
        ModelError: If it reads another one. The message names both blocks.
    """

    def __init__(self, pipeline: int, name: str, x: Streams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own, self._x = (pipeline, name), x
        for key in [key for key, (tensor, _) in _made.items() if tensor() is None]:
            del _made[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        inner = [t for t in given if not any(t is stream for stream in self._x)]
        makers = [_maker(t) for t in inner]
        for t, maker in zip(inner, makers, strict=True):
            if maker is not None and maker[0] == self._own[0] and maker != self._own:
                expected = "no tensors of other blocks than its streams (others have no gradient: .detach() them if they need none)"
                raise invalid(self._own[1], expected, f"one that {maker[1]} has computed, {[*t.shape]}", ModelError)
        out, name = func(*args, **(kwargs or {})), getattr(func, "overloadpacket", func).__name__
        carries = len(inner) < len(given) or any(makers) or any(t.requires_grad for t in inner)
        if carries and name != "detach" and not name.startswith("new_") and not name.endswith("_like"):
            for t in tree_leaves(out):
                if isinstance(t, Tensor) and t.is_floating_point():
                    _made[id(t)] = ref(t), self._own
        return out


def _maker(tensor: Tensor) -> Owner | None:
    """Return the block that has computed a tensor, or None."""
    found, owner = _made.get(id(tensor), (lambda: None, None))
    return owner if found() is tensor else None
