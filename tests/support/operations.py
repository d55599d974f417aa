"""Counts operations of torch, each of which launches at least one kernel on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from petra.torch_private import TorchDispatchMode

FREE = {
    *("view", "_unsafe_view", "_reshape_alias", "as_strided", "alias", "detach", "lift_fresh", "t", "transpose", "permute"),
    *("expand", "unsqueeze", "squeeze", "select", "slice", "split", "split_with_sizes", "unbind", "chunk"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
"""Operations that launch nothing."""


class Operations(TorchDispatchMode):
    """Counts the operations inside the ``with`` block that launch kernels, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Number of operations."""
        return sum(self.names.values())

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name not in FREE and not name.startswith("profiler::"):
            self.names[name] += 1
        return function(*args, **(kwargs or {}))
