"""Casts of one block's weights under autocast, each made once per update instead of once per evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from petra.engine.block_function import BlockFunction, WrappedFunction
from petra.engine.weights import WeightVersion
from petra.reversible import Coupling, ReversibleBlock, TwoFunctionCoupling
from petra.reversible.replay import NOTHING
from petra.torch_private import CAST, TorchDispatchMode, tree_leaves, version


class CastOnce(WrappedFunction):
    """Evaluates a block with copies, in the type of autocast, of those parameters that an evaluation casts exactly once, and uses
    nowhere else. The first evaluation of a run finds them.

    The copies are part of the autograd graph, so gradients with respect to the parameters are the same as with a cast in each
    evaluation. As a context, replaces the parameters by their copies.

    Args:
        inner: The function to evaluate.
        dtype: Type of autocast.
    """

    def __init__(self, inner: BlockFunction, dtype: torch.dtype) -> None:
        super().__init__(inner)
        self._dtype, self._watched = dtype, False
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self._copies: list[Tensor] = []
        self._versions: list[int | None] = []

    def begin_run(self) -> None:
        self._places, self._copies, self._watched = [], [], False
        self.inner.begin_run()

    def context(self, x: Tensor, version: WeightVersion | None) -> AbstractContextManager[object]:
        if version is not None:
            return NOTHING
        if self._watched:
            return self
        self._watched = True
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad and p.dtype == torch.float32}
        return watch_casts(trained, self._dtype, self._replace)

    def begin_update(self) -> None:
        self._copies = []

    def __enter__(self) -> None:
        versions = [version(p) for _, _, p in self._places]
        if not self._copies or versions != self._versions:
            self._versions = versions
            with torch.enable_grad():  # also for copies that a forward pass without a graph makes
                self._copies = [p.to(self._dtype) for _, _, p in self._places]
        for (owner, name, _), copy in zip(self._places, self._copies, strict=True):
            owner[name] = copy

    def __exit__(self, *_: object) -> None:
        for owner, name, parameter in self._places:
            owner[name] = parameter

    def _replace(self, names: list[str]) -> None:
        for name in names:
            path, _, own = name.rpartition(".")
            owner = self.module.get_submodule(path)._parameters
            parameter = owner[own]
            assert parameter is not None
            self._places.append((owner, own, parameter))


def allows_copies(module: nn.Module) -> bool:
    """Return whether a module's parameters may be replaced by copies: other reversible blocks look for them in a backward pass."""
    return not isinstance(module, ReversibleBlock) or isinstance(module, Coupling | TwoFunctionCoupling)


class watch_casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Find which parameters are cast exactly once, and used by no other operation, inside the ``with`` block.

    Args:
        parameters: Parameters by name.
        dtype: Type of the casts.
        report: Called with the names at the end of the ``with`` block.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, report: Callable[[list[str]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(p): name for name, p in parameters.items()}
        self._dtype, self._report = dtype, report
        self._casts = dict.fromkeys(self._names, 0)
        self._others = set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for key in {id(a) for a in tree_leaves((args, kwargs)) if id(a) in self._names}:
            if function is CAST and kwargs.get("dtype") is self._dtype:
                self._casts[key] += 1
            else:
                self._others.add(key)
        return function(*args, **kwargs)

    def __exit__(self, failed: Any, *rest: Any) -> None:
        super().__exit__(failed, *rest)  # type: ignore[no-untyped-call]
        if not failed:
            self._report([name for key, name in self._names.items() if self._casts[key] == 1 and key not in self._others])
