"""One block in a pipeline: how it gets through a forward and a later backward, and what it holds in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from petra.method import Keep, Weights
from petra.reversible import Gradients, Grid, ReversibleBlock, derive_seed, frozen_statistics, normalisations, seeded, unchanged
from petra.specs import Streams, as_streams, detached

Stash = dict[str, Tensor]


@dataclass
class Held:
    """What a block holds of one microbatch between F and B."""

    inputs: Streams = ()
    outputs: Streams = ()
    """With their graph; empty unless the graph is kept."""
    weights: Stash | None = None
    """Those of F if B needs them and the parameters are, or may by then be, others."""

    def bytes(self) -> int:
        """Of the inputs held; what a graph holds besides is autograd's."""
        return sum(t.nbytes for t in self.inputs)


class BlockRunner:
    """One block in a pipeline: forwards of many microbatches, then their backwards.

    Args:
        keep: what is held in between.
        weights: that B differentiates.
        k: microbatches per update.
        seed: of this block in this run; random numbers of microbatch m derive from it.
        input_needs_gradient: false for the block that takes the data.
        concurrent: other blocks run at the same time. Those that draw random numbers have to take turns, since generators are
            global; which do is found out from one more evaluation of the first microbatch.
        grid: on which a pair of streams that the block puts out starts, if streams are exact.
    """

    def __init__(
        self,
        module: nn.Module,
        keep: Keep,
        *,
        weights: Weights,
        k: int,
        seed: int,
        input_needs_gradient: bool,
        autocast: torch.dtype | None,
        concurrent: bool = False,
        grid: Grid | None = None,
    ) -> None:
        self.module, self.keep, self.weights, self.k, self.seed = module, keep, weights, k, seed
        self.input_needs_gradient, self.autocast = input_needs_gradient, autocast
        self.grid = grid
        if isinstance(module, ReversibleBlock) and grid is not None:
            module.carry_on(grid)
            self.grid = None
        self.reversible = isinstance(module, ReversibleBlock)
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.normalisations = normalisations(module)
        self.draws: bool | None = None if concurrent else True
        self.held: dict[int, Held] = {}
        self.predicted: Stash | None = None
        """What F uses instead of the parameters until the next update, if a remedy says so."""
        self.corrected: Stash | None = None
        """What B differentiates instead of the parameters until the next update, if a remedy says so."""
        self.previous: Stash | None = None
        """The older version of double weights; none before the first update."""
        self.updates = 0
        self._copies: Stash | None = None

    def forward(self, m: int, x: Streams) -> Streams:
        if self.draws is None:
            self.draws = self._draws(x)
        weights = self.forward_weights(m)
        for_backward = None if self.weights is Weights.CURRENT else weights
        if self.keep is Keep.GRAPH:
            inputs = self._leaves(x)
            with torch.enable_grad():
                y = self._evaluate(m, inputs, weights)
            self.held[m] = Held(inputs, y, for_backward)
            return detached(y)
        with torch.no_grad(), frozen_statistics(self.normalisations):
            y = self._evaluate(m, x, weights)
        if self.keep is Keep.INPUT:
            self.held[m] = Held(tuple(_alone(t) for t in x), weights=for_backward)
        elif self.weights is not Weights.CURRENT:
            self.held[m] = Held(weights=for_backward)
        return y

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        """The input (held or reconstructed), the gradient with respect to it, and those of the parameters.

        Args:
            y: the block's output, x̃ of the block behind it; used only if nothing is kept.
        """
        held = self.held.pop(m, Held())
        weights = self.corrected if self.weights is Weights.CURRENT else held.weights
        if self.keep is Keep.NOTHING:
            assert isinstance(self.module, ReversibleBlock)
            with self._autocast(y[0]):
                if weights is None or self.weights is not Weights.STASHED:
                    with _swapped(self.parameters, weights):
                        return self.module.inverse_vjp((y[0], y[1]), (dy[0], dy[1]), seed=self._seed(m))
                # PETRA's Table 4, fourth row: reconstruct with current weights, differentiate the stashed ones.
                held.inputs = self.module.inverse(y[0], y[1], seed=self._seed(m))
        if not held.outputs:
            held.inputs = self._leaves(held.inputs)
            with torch.enable_grad():
                held.outputs = self._evaluate(m, held.inputs, weights)
        return self._differentiate(held, dy, weights)

    def replay(self, m: int, x: Streams, weights: Stash | None) -> Streams:
        """See :meth:`Stage.replay`."""
        with torch.enable_grad(), frozen_statistics(self.normalisations):
            return self._evaluate(m, x, weights)

    @torch.no_grad()
    def evaluate(self, x: Streams) -> Streams:
        with self._autocast(x[0]):
            return self._streams(as_streams(self.module(*x)), x[0])

    def before_update(self) -> None:
        """Copies the weights that microbatches in flight were forwarded with, once for all of them."""
        if self.weights is Weights.CURRENT:
            return
        waiting = [held for held in self.held.values() if held.weights is None]
        double = self.weights is Weights.DOUBLE
        if waiting or double:
            copies = self._copied()
            for held in waiting:
                held.weights = copies
            self.previous = copies if double else None
        self._copies = None
        self.updates += 1

    def _evaluate(self, m: int, x: Streams, weights: Stash | None) -> Streams:
        seed = self._seed(m)
        arguments, seed = ({"seed": seed}, None) if self.reversible else ({}, seed)
        with self._autocast(x[0]), unchanged(x, self.module), seeded(seed, x[0].device):
            y = self.module(*x, **arguments) if weights is None else functional_call(self.module, weights, x, arguments)
            return self._streams(as_streams(y), x[0])

    def _differentiate(self, held: Held, dy: Streams, weights: Stash | None) -> tuple[Streams, Streams, Gradients]:
        wanted = [t for t in held.inputs if t.requires_grad]
        leaves = list(self.parameters.values() if weights is None else (weights[name] for name in self.parameters))
        connected = [(y, d) for y, d in zip(held.outputs, dy, strict=True) if y.requires_grad]
        if not connected:  # neither the data nor any weight needs a gradient
            return detached(held.inputs), (), {}
        found = torch.autograd.grad([y for y, _ in connected], [*wanted, *leaves], [d for _, d in connected], allow_unused=True)
        dx = tuple(torch.zeros_like(t) if d is None else d for t, d in zip(wanted, found, strict=False))
        gradients = {p: g for p, g in zip(self.parameters.values(), found[len(wanted) :], strict=True) if g is not None}
        return detached(held.inputs), dx, gradients

    def _leaves(self, x: Streams) -> Streams:
        return tuple(t.detach().requires_grad_(self.input_needs_gradient and t.is_floating_point()) for t in x)

    def forward_weights(self, m: int) -> Stash | None:
        """What F of microbatch m uses; None for the parameters as they are."""
        if self.weights is Weights.DOUBLE and self.updates == m // self.k:
            return self.previous or (self._copied() if self.keep is Keep.GRAPH else None)
        if self.predicted is not None:
            return self.predicted
        # The optimizer would write through a graph that refers to the parameters.
        return self._copied() if self.keep is Keep.GRAPH and self.weights is not Weights.CURRENT else None

    def _copied(self) -> Stash:
        """Copies of the parameters, one for each of their versions."""
        if self._copies is None:
            self._copies = {name: p.detach().clone().requires_grad_() for name, p in self.parameters.items()}
        return self._copies

    def _seed(self, m: int) -> int | None:
        return derive_seed(self.seed, m) if self.draws else None

    def _draws(self, x: Streams) -> bool:
        with seeded(self.seed), torch.no_grad(), frozen_statistics(self.normalisations), self._autocast(x[0]):
            before = torch.get_rng_state()
            self.module(*x)
            return not torch.equal(before, torch.get_rng_state())

    def _autocast(self, x: Tensor) -> AbstractContextManager[object]:
        # Casts cached in a forward without graph would cut the graph of the next evaluation.
        return nullcontext() if self.autocast is None else torch.autocast(x.device.type, self.autocast, cache_enabled=False)

    def _streams(self, streams: Streams, x: Tensor) -> Streams:
        """Streams keep their type under autocast: reconstruction subtracts what forward added. Exact pairs start on the grid."""
        full = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        streams = tuple(t.to(full) if t.dtype == self.autocast else t for t in streams)
        return streams if self.grid is None or len(streams) != 2 else tuple(self.grid.enter(t) for t in streams)


@contextmanager
def _swapped(parameters: Mapping[str, nn.Parameter], weights: Stash | None) -> Iterator[None]:
    """Inside, the parameters hold these weights; None leaves them as they are."""
    if weights is None:
        yield
        return
    own = {name: p.data for name, p in parameters.items()}
    for name, p in parameters.items():
        p.data = weights[name].data
    try:
        yield
    finally:
        for name, p in parameters.items():
            p.data = own[name]


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own: a view of a received message would keep the whole message alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
