"""Additive couplings: PETRA's block (Fig. 2) and RevNet's block, each with a fused inverse and vector-Jacobian product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from petra.errors import ModelError, invalid, require
from petra.reversible.grid import Grid
from petra.reversible.replay import autocast_to, derive_seed, forbid_inplace, frozen_statistics, modified, normalisations, seeded
from petra.specs import Streams
from petra.torch_private import is_replica, leaves_of, set_grad_enabled, vector_jacobian_products, version_counter

Pair = tuple[Tensor, Tensor]
Gradients = dict[nn.Parameter, Tensor]
"""Gradient by parameter."""


class ReversibleBlock(nn.Module, ABC):
    """Base class of invertible blocks: bijections of the streams (x1, x2), tensors of shape (B, ...).

    Further tensors are context, such as the positions where documents begin. A block reads them and returns them unchanged. They
    are side tensors, which :meth:`inverse_vjp` gets no gradients of, or floating-point tensors whose gradients are zero.

    Every method takes a ``seed`` for the random numbers inside the block, such as dropout masks. The same seed gives the same
    masks in every method. With ``seed=None`` the block draws from the global generators, as any module does.
    """

    @abstractmethod
    def forward(self, x1: Tensor, x2: Tensor, *context: Tensor, seed: int | None = None) -> Streams:
        """Return (y1, y2, *context) in the shapes of the input, differentiable by plain autograd."""

    @abstractmethod
    def inverse(self, y1: Tensor, y2: Tensor, *context: Tensor, seed: int | None = None) -> Streams:
        """Reconstruct (x1, x2, *context) from (y1, y2, *context), without gradients and without updating running statistics."""

    @abstractmethod
    def inverse_vjp(self, y: Streams, dy: Streams, *, seed: int | None = None) -> tuple[Streams, Streams, Gradients]:
        """Reconstruct the input and compute all gradients from the output ``y`` and its gradient ``dy``.

        Each function is evaluated only once, so a forward and a backward cost as much as four forwards, and not five as with a
        separate inverse. This method updates running statistics. It does not accumulate into ``.grad``.

        Returns:
            The input, the gradient with respect to it, and the gradients of the parameters.
        """

    def fix_trained(self) -> None:
        """Differentiate the parameters that require gradients now. Blocks may otherwise look for them in every call.

        Call this method again after freezing or unfreezing parameters.
        """

    def enable_exact_streams(self, grid: Grid) -> None:
        """Make the inverse exact: from now on, if the input is on ``grid``, the output is on it too.

        Override this method in blocks that support exact streams.

        Raises:
            ModelError: If the block does not support exact streams.
        """
        raise invalid("exact_streams", "reversible blocks that override enable_exact_streams", type(self).__name__, ModelError)


class Coupling(ReversibleBlock):
    """PETRA's block: (x1, x2) → (x2, x1 + F(x2)) (PETRA, Fig. 2). The two streams swap places.

    Args:
        f: Module that maps a tensor with the shape of x2, and the context streams if there are any, to a tensor with the shape of
            x1; another shape raises a ModelError. It must not modify its input in place.
    """

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        require(isinstance(f, nn.Module), "f", "a module", type(f).__name__, ModelError)  # its weights would get no gradients
        self.f = f
        self.grid: Grid | None = None
        self._inspected = False
        self._trained: list[nn.Parameter] | None = None

    def forward(self, x1: Tensor, x2: Tensor, *context: Tensor, seed: int | None = None) -> Streams:
        f = self._evaluate(x2, context, seed)
        if getattr(f, "shape", None) != x1.shape:
            got = [*f.shape] if isinstance(f, Tensor) else type(f).__name__
            raise invalid("f", f"a function with outputs of the shape of its stream, {[*x1.shape]}", got, ModelError)
        y2 = x1 + self._rounded(f)
        if self.grid is not None:
            self.grid.record(y2)
        return x2, y2, *context

    @torch.no_grad()
    def inverse(self, y1: Tensor, y2: Tensor, *context: Tensor, seed: int | None = None) -> Streams:
        with frozen_statistics(normalisations(self)):
            return y2 - self._rounded(self._evaluate(y1, context, seed)), y1, *context

    def inverse_vjp(self, y: Streams, dy: Streams, *, seed: int | None = None) -> tuple[Streams, Streams, Gradients]:
        (y1, y2, *context), (dy1, dy2, *dcontext) = y, dy
        x2, was_enabled = y1.detach().requires_grad_(), torch.is_grad_enabled()
        parameters = trainable_parameters(self.f) if self._trained is None else self._trained
        set_grad_enabled(True)
        try:
            f = self._evaluate(x2, context, seed)
        finally:
            set_grad_enabled(was_enabled)
        if not (self._inspected or torch.compiler.is_compiling()):
            others = [[*t.shape] for t in leaves_of(f) if not any(t is own for own in (x2, *parameters))]
            got = f"one that also reads tensors that require gradients, of shapes {others}"
            require(not others, "f", "a function of its input and its parameters only", got, ModelError)
            self._inspected = True
        x1 = y2.detach() - self._rounded(f.detach())
        df = dy2 if dy2.dtype is f.dtype else dy2.to(f.dtype)
        with autocast_to(x2.device.type, None):  # autocast is for forwards only: plain autograd runs its backward outside of it too
            if f.requires_grad:
                dx2, *gradients = vector_jacobian_products((f,), (x2, *parameters), (df,))
            else:  # F may return a constant, as for a layer that it drops
                dx2, gradients = None, [None] * len(parameters)
        dy1 = dy1 if dx2 is None else dx2 + dy1
        used = {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}
        return (x1, y1, *context), (dy2, dy1, *dcontext), used

    def fix_trained(self) -> None:
        self._trained = trainable_parameters(self.f)

    def enable_exact_streams(self, grid: Grid) -> None:
        self.grid = grid

    def _rounded(self, f: Tensor) -> Tensor:
        return f if self.grid is None else self.grid.round(f)

    def _evaluate(self, x: Tensor, context: Sequence[Tensor], seed: int | None) -> Tensor:
        f, inputs = self.f, (x, *context)
        if seed is None and not context:  # the context managers below would take as long as a small function
            before, y = version_counter(x), f(x)
            if version_counter(x) != before:
                raise modified(type(f).__name__)
            return y  # type: ignore[no-any-return]
        with forbid_inplace(inputs, type(f).__name__), seeded(seed, x.device):
            return f(*inputs)  # type: ignore[no-any-return]


class TwoFunctionCoupling(ReversibleBlock):
    """RevNet's block: y1 = x1 + F(x2), y2 = x2 + G(y1) (Gomez et al. 2017, section 3.1). Two of PETRA's blocks in a row.

    F returns the shape of x1, and G that of x2. They may share weights, but no layer with running statistics: the backward pass
    evaluates G before F, so the statistics would be updated in another order than in the forward pass.

    Raises:
        ModelError: If F and G share a layer with running statistics.
    """

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        for layer in set(normalisations(f)) & set(normalisations(g)):
            raise invalid("g", "layers with running statistics of its own", f"a {type(layer).__name__} that f uses too", ModelError)
        self.f = f
        self.g = g
        # In a tuple, which nn.Module does not register: f and g appear once in the state dict.
        self._halves = (Coupling(f), Coupling(g))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("f", "g") and "_halves" in vars(self) and not is_replica(self):
            self._halves[name == "g"].f, self._halves[name == "g"]._trained = value, None

    def forward(self, x1: Tensor, x2: Tensor, *context: Tensor, seed: int | None = None) -> Streams:
        first, second = self._halves
        return second(*first(x1, x2, *context, seed=_half_seed(seed, 0)), seed=_half_seed(seed, 1))  # type: ignore[no-any-return]

    def inverse(self, y1: Tensor, y2: Tensor, *context: Tensor, seed: int | None = None) -> Streams:
        first, second = self._halves
        return first.inverse(*second.inverse(y1, y2, *context, seed=_half_seed(seed, 1)), seed=_half_seed(seed, 0))

    def inverse_vjp(self, y: Streams, dy: Streams, *, seed: int | None = None) -> tuple[Streams, Streams, Gradients]:
        first, second = self._halves
        y, dy, gradients = second.inverse_vjp(y, dy, seed=_half_seed(seed, 1))
        x, dx, more = first.inverse_vjp(y, dy, seed=_half_seed(seed, 0))
        add_gradients(gradients, more)
        return x, dx, gradients

    def fix_trained(self) -> None:
        for half in self._halves:
            half.fix_trained()

    def enable_exact_streams(self, grid: Grid) -> None:
        for half in self._halves:
            half.enable_exact_streams(grid)


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters with ``requires_grad``, each once. ``module.parameters()`` is slower, because it builds their names."""
    found: dict[nn.Parameter, None] = {}
    modules = [module]
    while modules:
        module = modules.pop()
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found[parameter] = None
        modules.extend(child for child in module._modules.values() if child is not None)
    return list(found)


def add_gradients(total: Gradients, more: Gradients) -> None:
    """Add ``more`` to ``total``. A parameter that occurs in both gets the sum."""
    for parameter, gradient in more.items():
        total[parameter] = total[parameter] + gradient if parameter in total else gradient


def _half_seed(seed: int | None, half: int) -> int | None:
    return None if seed is None else derive_seed(seed, half)
