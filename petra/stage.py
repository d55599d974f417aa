"""A stage: consecutive blocks that one worker owns, and how each of them gets through a forward and a later backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.func import functional_call

from petra.method import Keep, Weights
from petra.reversible import Gradients, Grid, ReversibleBlock, derive_seed, frozen_statistics, normalisations, seeded, unchanged
from petra.streams import Streams, as_streams, detached

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


class Stage:
    """Consecutive blocks of a model with their gradients, independent of where messages come from.

    Args:
        blocks: modules on their device, in training mode.
        keeps: for each block what it holds between F and B.
        weights: which weights B differentiates.
        first_block: index of the first block in the model; the run's seed, it and the microbatch give a block's random numbers, so
            they don't depend on how the model is cut.
        k: microbatches per update; gradients are accumulated as their average.
        autocast: compute in this type (bf16), or none.
        returns_input: whether the stage before needs x̃ to reconstruct.
        channels_last: memory format of 4-d streams.
        concurrent: other stages run at the same time, in other threads.
        grid: that reversible blocks carry their streams on (:mod:`petra.reversible.grid`), or none.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        keeps: Sequence[Keep],
        *,
        weights: Weights = Weights.CURRENT,
        first_block: int = 0,
        k: int = 1,
        seed: int = 0,
        autocast: torch.dtype | None = None,
        returns_input: bool = True,
        channels_last: bool = False,
        concurrent: bool = False,
        grid: Grid | None = None,
    ) -> None:
        self.module, self.grid = nn.ModuleList(blocks), grid
        self.after_block: Callable[[BlockRunner], None] | None = None
        """Called with each block when the gradients of a microbatch have been added to its own."""
        self.k, self.returns_input, self.channels_last = k, returns_input, channels_last
        self.runners = [
            BlockRunner(
                block,
                keep,
                weights=weights,
                k=k,
                seed=derive_seed(seed, first_block + i),
                input_needs_gradient=first_block + i > 0,
                autocast=autocast,
                concurrent=concurrent,
                grid=grid,
            )
            for i, (block, keep) in enumerate(zip(blocks, keeps, strict=True))
        ]
        self._trained = [p for p in self.module.parameters() if p.requires_grad]
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, m: int, x: Streams) -> Streams:
        """F of microbatch m: the stage's output, detached."""
        for runner in self.runners:
            x = self._contiguous(runner.forward(m, x))
        return x

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams]:
        """B of microbatch m: adds 1/k of the parameters' gradients to ``.grad`` and returns (x̃, δ) of the stage's input.

        Args:
            y: the stage's output as the next stage holds or reconstructs it; empty if the last block keeps more than nothing.
            dy: the loss's gradient with respect to it.
        """
        for runner in reversed(self.runners):
            y, dy, gradients = runner.backward(m, y, dy)
            y, dy = self._contiguous(y), self._contiguous(dy)
            if gradients:
                torch._foreach_add_([p.grad for p in gradients], list(gradients.values()), alpha=1 / self.k)  # type: ignore[misc]
            if self.after_block is not None:
                self.after_block(runner)
        return y if self.returns_input else (), dy

    def replay(self, m: int, x: Streams, weights: Sequence[Stash | None]) -> Streams:
        """F of microbatch m again, under plain autograd: for each block the weights given, or its own; nothing is held or moved."""
        for runner, own in zip(self.runners, weights, strict=True):
            x = self._contiguous(runner.replay(m, x, own))
        return x

    def evaluate(self, x: Streams) -> Streams:
        """A forward for evaluation: running statistics used, nothing held."""
        largest = None if self.grid is None else self.grid.largest
        for runner in self.runners:
            x = self._contiguous(runner.evaluate(x))
        if self.grid is not None and largest is not None:
            self.grid.largest = largest  # nothing is reconstructed, so any range will do
        return x

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around an optimizer step that zeroes the gradients after it.

        Graphs that wait for their backward alias the weights; the step writes through them (activations old, weights new, as in
        PipeMare), which autograd would refuse if it saw the version change.
        """
        in_flight = any(held.outputs for runner in self.runners for held in runner.held.values())
        for runner in self.runners:
            runner.before_update()
        with _unsafe_preserve_version_counter(tuple(self._trained)) if in_flight else nullcontext():
            yield
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Forgets what has been accumulated."""
        if self._trained:
            torch._foreach_zero_([p.grad for p in self._trained])  # type: ignore[misc]

    def previous(self) -> dict[Tensor, Tensor]:
        """The older version of double weights; empty for other methods, and before the first update."""
        return {p: r.previous[name] for r in self.runners if r.previous is not None for name, p in r.parameters.items()}

    def resume(self, updates: int, previous: Mapping[Tensor, Tensor]) -> None:
        """Goes on after ``updates`` updates, with what :meth:`previous` gave then."""
        for runner in self.runners:
            runner.updates = updates
            if previous:
                runner.previous = {name: previous[p].to(p, copy=True).requires_grad_() for name, p in runner.parameters.items()}

    def held_bytes(self) -> int:
        """Bytes of the inputs held between F and B, all microbatches in flight."""
        return sum(held.bytes() for runner in self.runners for held in runner.held.values())

    def _contiguous(self, streams: Streams) -> Streams:
        """The same layout on every path, so that results don't depend on how the model is cut; a no-op where it is that already."""
        if not self.channels_last:
            return tuple([t.contiguous() for t in streams])
        return tuple([t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t.contiguous() for t in streams])


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


def loss_and_gradient(loss: Callable[[Tensor, Tensor], Tensor], output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of one microbatch and its gradient with respect to the last stage's output, both detached."""
    output = output.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(output, targets)
    (gradient,) = torch.autograd.grad(value, output)
    return value.detach(), gradient
