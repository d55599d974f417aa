"""Counts the FLOPs of matrix products and convolutions, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry

from petra.torch_private import TorchDispatchMode


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the FLOPs of all operations inside the ``with`` block in ``total``.

    Unlike torch's ``FlopCounterMode`` it does not hook modules, so graphs may be differentiated in parts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out
