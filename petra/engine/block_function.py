"""One block as a function of microbatch, input and weights, and what changes how it is evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from petra.engine.weights import WeightVersion
from petra.reversible import Coupling, Gradients, ReversibleBlock, TwoFunctionCoupling, derive_seed
from petra.reversible.replay import (
    NOTHING,
    forbid_buffer_changes,
    forbid_inplace,
    frozen_statistics,
    may_draw,
    normalisations,
    seeded,
    watch_draws,
)
from petra.specs import Streams, as_streams


class Around:
    """What changes how a block is evaluated. Each method changes nothing by default."""

    def context(self, x: Tensor, *, training: bool) -> AbstractContextManager[object]:
        """Return the context of an evaluation or an inverse, given the first stream of its input."""
        return NOTHING

    def outputs(self, x: Tensor, y: Streams, *, training: bool) -> Streams:
        """Return the output of an evaluation instead of ``y``, given the first stream of its input."""
        return y


class BlockFunction:
    """One block as a function that gives the same output whenever microbatch, input and weights are the same.

    Args:
        module: The block, on its device and in training mode.
        seed: Seed of this block in this run. The random numbers of microbatch m derive from it and m.
        name: What messages call the block; by default its type.

    Attributes:
        module, name: As given.
        around: What changes how the block is evaluated, from the inside out.
        parameters: Trained parameters by name.
        draws: Whether the block may draw random numbers, so that the generators are seeded for it. None: it has not done so in this
            run so far.
        checked: Classes, modes and hooks of the block's modules when its passes were checked; None if they were not.
    """

    def __init__(self, module: nn.Module, seed: int, name: str | None = None) -> None:
        self.module, self.name, self._seed = module, name or type(module).__name__, seed
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.around: list[Around] = []
        self.checked: object = None
        self._normalisations = normalisations(module)
        self._reversible = module if isinstance(module, ReversibleBlock) else None
        # Couplings seed the generators and check their functions themselves. Other reversible blocks may use the seed otherwise.
        self._is_coupling = isinstance(module, Coupling | TwoFunctionCoupling)
        self.begin_run()

    def begin_run(self) -> None:
        """Find again which parameters are trained, and whether the block may draw random numbers: it may have new hooks."""
        if self._reversible is not None:
            self._reversible.fix_trained()
        self._keeps_buffers = False
        # A block that is not known is watched, and evaluated again if it has drawn. Statistics and inverses do not allow that.
        self.draws = may_draw(self.module)
        own_inverse = self._reversible is not None and not self._is_coupling
        if own_inverse or (self.draws is None and (self._is_coupling or self._normalisations)):
            self.draws = True

    def __call__(self, m: int, x: Streams, version: WeightVersion | None) -> Streams:
        """Return the block's output for microbatch ``m``.

        Args:
            version: Weights to use; None for the parameters.

        Raises:
            ModelError: If the block changes its input in place.
        """
        if self._is_coupling and version is None and not self.around:
            return self.module(*x, seed=self._seed_of(m))  # type: ignore[no-any-return]
        with self._inside(x[0]):
            if self.draws is None and type(x[0]) is Tensor:  # states of generators can't be compared under fake tensors
                with watch_draws(x[0].device) as watch:
                    y = self._evaluate(x, None, version)
                self.draws = watch.drew or None
            if self.draws is not None or type(x[0]) is not Tensor:
                y = self._evaluate(x, self._seed_of(m), version)
        return self._finished(x[0], y)

    def _evaluate(self, x: Streams, seed: int | None, version: WeightVersion | None) -> Tensor | Streams:
        arguments, seed = ({}, seed) if self._reversible is None else ({"seed": seed}, None)
        with forbid_inplace(x, self.name), seeded(seed, x[0].device):
            if version is None:
                return self.module(*x, **arguments)  # type: ignore[no-any-return]
            return functional_call(self.module, version, x, arguments)  # type: ignore[no-any-return]

    def inverse(self, m: int, y: Streams) -> Streams:
        """Reconstruct the input of a reversible block from its output, with the parameters."""
        assert self._reversible is not None
        with self._inside(y[0]):
            return self._reversible.inverse(*y, seed=self._seed_of(m))

    def inverse_vjp(self, m: int, y: Streams, dy: Streams, version: WeightVersion | None) -> tuple[Streams, Streams, Gradients]:
        """Return a reversible block's input, the gradient with respect to it, and those of the parameters.

        Args:
            version: Weights that reconstruct and are differentiated; None for the parameters.
        """
        assert self._reversible is not None
        if version is None and not self.around:
            return self._reversible.inverse_vjp(y, dy, seed=self._seed_of(m))
        with self._inside(y[0]), self.using(version):
            return self._reversible.inverse_vjp(y, dy, seed=self._seed_of(m))

    @torch.no_grad()
    def evaluate(self, x: Streams) -> Streams:
        """Return the output without a graph, with the module in the mode that the caller has set."""
        with self._inside(x[0], training=False):
            y = self.module(*x)
        return self._finished(x[0], y, training=False)

    def using(self, version: WeightVersion | None) -> AbstractContextManager[None]:
        """Give the block's parameters the values of ``version`` inside the ``with`` block; None leaves them as they are."""
        return NOTHING if version is None else _replaced(self.parameters, version)

    def keeping_statistics(self) -> AbstractContextManager[None]:
        """Disable updates of running statistics inside the ``with`` block."""
        return frozen_statistics(self._normalisations) if self._normalisations else NOTHING

    def to_be_repeated(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass that the backward pass repeats: running statistics don't move.

        The first one of a run checks that the block changes no other buffer (:class:`forbid_buffer_changes`).
        """
        if self._keeps_buffers:
            return self.keeping_statistics()
        self._keeps_buffers = True
        stack = ExitStack()
        stack.enter_context(self.keeping_statistics())
        stack.enter_context(forbid_buffer_changes(self.module, self.name))
        return stack

    def _inside(self, x: Tensor, *, training: bool = True) -> AbstractContextManager[object]:
        """Return the contexts in which the block is evaluated."""
        if not self.around:
            return NOTHING
        stack = ExitStack()
        for each in reversed(self.around):
            stack.enter_context(each.context(x, training=training))
        return stack

    def _finished(self, x: Tensor, y: Tensor | Streams, *, training: bool = True) -> Streams:
        y = as_streams(y)
        for each in self.around:
            y = each.outputs(x, y, training=training)
        return y

    def _seed_of(self, m: int) -> int | None:
        return None if self.draws is False else derive_seed(self._seed, m)


@contextmanager
def _replaced(parameters: Mapping[str, nn.Parameter], version: WeightVersion) -> Iterator[None]:
    """Give the parameters the values of ``version`` inside the ``with`` block."""
    own = {name: p.data for name, p in parameters.items()}
    for name, p in parameters.items():
        p.data = version[name].data
    try:
        yield
    finally:
        for name, p in parameters.items():
            p.data = own[name]
