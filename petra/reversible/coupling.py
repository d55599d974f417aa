"""Additive couplings: PETRA's block (Fig. 2) and RevNet's pair of functions, with the fused inverse + vector-Jacobian product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from petra.errors import ModelError
from petra.reversible.grid import Grid
from petra.reversible.replay import derive_seed, frozen_statistics, normalisations, seeded, unchanged

Pair = tuple[Tensor, Tensor]
Gradients = dict[nn.Parameter, Tensor]


class ReversibleBlock(nn.Module, ABC):
    """A bijection of the streams (x1, x2) whose input can be computed from its output.

    ``seed`` replays the block's random numbers (dropout): the same seed gives the same masks in every method; ``None`` draws from
    the global generators as usual.
    """

    @abstractmethod
    def forward(self, x1: Tensor, x2: Tensor, *, seed: int | None = None) -> Pair:
        """(y1, y2) from (x1, x2), differentiable as usual."""

    @abstractmethod
    def inverse(self, y1: Tensor, y2: Tensor, *, seed: int | None = None) -> Pair:
        """(x1, x2) from (y1, y2), without gradients; running statistics stay as they are."""

    @abstractmethod
    def inverse_vjp(self, y: Pair, dy: Pair, *, seed: int | None = None) -> tuple[Pair, Pair, Gradients]:
        """The input, the gradient with respect to it, and the gradients of the parameters, from the output and its gradient.

        One evaluation of each function gives all three, so forward and backward cost four forwards in all, where a separate
        inverse makes it five. Running statistics move here. Nothing is accumulated into ``.grad``.
        """

    def carry_on(self, grid: Grid) -> None:
        """From now on keeps streams that come in on the grid on it, so that the inverse is exact.

        Raises:
            ModelError: the block can't.
        """
        raise ModelError(f"exact_streams: found a {type(self).__name__}, accepted are blocks with a carry_on of their own")


class Coupling(ReversibleBlock):
    """PETRA's block: (x1, x2) → (x2, x1 + F(x2)) (PETRA, Fig. 2), whose streams trade places.

    Args:
        f: any module from the shape of x2 to the shape of x1; it may not change its input in place.
    """

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.grid: Grid | None = None

    def forward(self, x1: Tensor, x2: Tensor, *, seed: int | None = None) -> Pair:
        y2 = x1 + self._on_grid(self._evaluate(x2, seed))
        if self.grid is not None:
            self.grid.watch(y2)
        return x2, y2

    @torch.no_grad()
    def inverse(self, y1: Tensor, y2: Tensor, *, seed: int | None = None) -> Pair:
        with frozen_statistics(normalisations(self)):
            return y2 - self._on_grid(self._evaluate(y1, seed)), y1

    @torch.no_grad()
    def inverse_vjp(self, y: Pair, dy: Pair, *, seed: int | None = None) -> tuple[Pair, Pair, Gradients]:
        (y1, y2), (dy1, dy2) = y, dy
        x2 = y1.detach().requires_grad_()
        with torch.enable_grad():
            f = self._evaluate(x2, seed)
        x1 = y2 - self._on_grid(f.detach())
        parameters = trained(self.f)
        device = x2.device.type
        # Autocast is for evaluations: plain autograd runs its backward outside it too.
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            dx2, *gradients = torch.autograd.grad(f, [x2, *parameters], dy2.to(f.dtype), allow_unused=True)
        found = {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}
        return (x1, y1), (dy2, dy1 if dx2 is None else dy1 + dx2), found

    def carry_on(self, grid: Grid) -> None:
        self.grid = grid

    def _on_grid(self, f: Tensor) -> Tensor:
        return f if self.grid is None else self.grid.round(f)

    def _evaluate(self, x: Tensor, seed: int | None) -> Tensor:
        with unchanged((x,), self.f), seeded(seed, x.device):
            f: Tensor = self.f(x)
        return f


class DownsamplingCoupling(Coupling):
    """i-RevNet's block: (x1, x2) → (S x2, S x1 + F(x2)), where S moves pixels to channels (Jacobsen et al. 2018, Eq. 1).

    Streams of shape (B, C, H, W) become (B, C · factor², H / factor, W / factor). S permutes entries, so its inverse is also its
    adjoint: this is :class:`Coupling` of S x1 and S x2, and what it returns goes back through S⁻¹.

    Args:
        f: any module from the shape of x2 to that of S x1.
    """

    def __init__(self, f: nn.Module, factor: int = 2) -> None:
        super().__init__(nn.Sequential(nn.PixelShuffle(factor), f))
        self.factor = factor

    def forward(self, x1: Tensor, x2: Tensor, *, seed: int | None = None) -> Pair:
        return super().forward(pixel_unshuffle(x1, self.factor), pixel_unshuffle(x2, self.factor), seed=seed)

    def inverse(self, y1: Tensor, y2: Tensor, *, seed: int | None = None) -> Pair:
        return self._upsampled(super().inverse(y1, y2, seed=seed))

    def inverse_vjp(self, y: Pair, dy: Pair, *, seed: int | None = None) -> tuple[Pair, Pair, Gradients]:
        x, dx, gradients = super().inverse_vjp(y, dy, seed=seed)
        return self._upsampled(x), self._upsampled(dx), gradients

    def _upsampled(self, pair: Pair) -> Pair:
        first, second = pair
        return pixel_shuffle(first, self.factor), pixel_shuffle(second, self.factor)


class TwoFunctionCoupling(ReversibleBlock):
    """RevNet's block: y1 = x1 + F(x2), y2 = x2 + G(y1) (Gomez et al. 2017, section 3.1); two of PETRA's, one after the other."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g
        # A tuple, so that f and g are registered once, under their own names.
        self._halves = (Coupling(f), Coupling(g))

    def forward(self, x1: Tensor, x2: Tensor, *, seed: int | None = None) -> Pair:
        first, second = self._halves
        return second(*first(x1, x2, seed=_half(seed, 0)), seed=_half(seed, 1))  # type: ignore[no-any-return]

    def inverse(self, y1: Tensor, y2: Tensor, *, seed: int | None = None) -> Pair:
        first, second = self._halves
        return first.inverse(*second.inverse(y1, y2, seed=_half(seed, 1)), seed=_half(seed, 0))

    def inverse_vjp(self, y: Pair, dy: Pair, *, seed: int | None = None) -> tuple[Pair, Pair, Gradients]:
        first, second = self._halves
        y, dy, gradients = second.inverse_vjp(y, dy, seed=_half(seed, 1))
        x, dx, rest = first.inverse_vjp(y, dy, seed=_half(seed, 0))
        add_gradients(gradients, rest)
        return x, dx, gradients

    def carry_on(self, grid: Grid) -> None:
        for half in self._halves:
            half.carry_on(grid)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Parameters inside that want a gradient, each once; ``module.parameters()`` takes longer, since it makes names for them."""
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
    """Adds ``more`` to ``total``; a parameter that is used twice gets the sum."""
    for parameter, gradient in more.items():
        total[parameter] = total[parameter] + gradient if parameter in total else gradient


def _half(seed: int | None, half: int) -> int | None:
    return None if seed is None else derive_seed(seed, half)
