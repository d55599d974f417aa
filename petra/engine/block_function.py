"""One block as a function of input, weights and microbatch: repeatable random numbers, autocast and exact streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from petra.engine.casts import WeightCasts
from petra.engine.weights import WeightVersion
from petra.reversible import Coupling, Gradients, Grid, ReversibleBlock, TwoFunctionCoupling, derive_seed
from petra.reversible.replay import (
    NOTHING,
    autocast_to,
    forbid_buffer_changes,
    forbid_inplace,
    frozen_statistics,
    normalisations,
    seeded,
    watch_draws,
)
from petra.specs import Streams, as_streams


class BlockFunction:
    """One block as a function that gives the same output whenever input, weights and microbatch are the same.

    Args:
        module: The block, on its device and in training mode.
        seed: Seed of this block in this run. The random numbers of microbatch m derive from it and m.
        autocast: Type in which the block computes, or None. Its inputs and outputs keep the type of the streams.
        grid: Grid for exact streams (:mod:`petra.reversible.grid`), or None.
        cast_once: Whether to keep the casts of the parameters until :meth:`begin_update`, instead of casting in each evaluation.

    Attributes:
        seed, autocast, cast_once: As given.
        name: What messages call the block: its type, or ``block`` and its name in the model.
        parameters: Trained parameters by name.
        normalisations: Layers with running statistics.
        draws: Whether the block draws random numbers, so that the generators are seeded for it. They are global: threads that run
            such blocks take turns. None until the first forward pass of a run has found it.
    """

    def __init__(
        self, module: nn.Module, *, seed: int, autocast: torch.dtype | None, grid: Grid | None = None, cast_once: bool = False
    ) -> None:
        self.module, self.name = module, type(module).__name__
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.normalisations = normalisations(module)
        self.seed, self.autocast, self.cast_once, self._grid = seed, autocast, cast_once, grid
        self._reversible = module if isinstance(module, ReversibleBlock) else None
        # Couplings seed the generators and check their functions themselves. Other reversible blocks may use the seed otherwise.
        self._is_coupling = isinstance(module, Coupling | TwoFunctionCoupling)
        self._needs_no_context = self._is_coupling and autocast is None
        # Other reversible blocks may look for their parameters when they differentiate.
        own = self._reversible is not None and not self._is_coupling
        self._casts = WeightCasts(module, autocast) if cast_once and autocast is not None and not own else None
        self.begin_run()
        if self._reversible is not None and grid is not None:
            self._reversible.enable_exact_streams(grid)
            self._grid = None

    def begin_run(self) -> None:
        """Find again which parameters are trained and cast, and whether the block draws random numbers.

        Rates of dropout may have changed since the last run.
        """
        if self._reversible is not None:
            self._reversible.fix_trained()
        self._watched, self._keeps_buffers = self._casts is None, False
        self.draws: bool | None = True if self._reversible is not None and not self._is_coupling else None

    def __call__(self, m: int, x: Streams, version: WeightVersion | None) -> Streams:
        """Return the block's output for microbatch ``m``.

        Args:
            version: Weights to use; None for the parameters.

        Raises:
            ModelError: If the block changes its input in place.
        """
        seed = self._seed_of(m)
        if self._needs_no_context and self.draws is not None and version is None:
            return self.module(*x, seed=seed)  # type: ignore[no-any-return]
        arguments, seed = ({}, seed) if self._reversible is None else ({"seed": seed}, None)
        watch = NOTHING if self.draws is not None else watch_draws(self._set_draws)
        with self._autocast(x[0]), self._cast(version), watch, forbid_inplace(x, self.module), seeded(seed, x[0].device):
            y = self.module(*x, **arguments) if version is None else functional_call(self.module, version, x, arguments)
            return self._as_streams(y, x[0])

    def inverse(self, m: int, y: Streams) -> Streams:
        """Reconstruct the input of a reversible block from its output, with the parameters."""
        assert self._reversible is not None
        with self._autocast(y[0]), self._cast(None):
            return self._reversible.inverse(*y, seed=self._seed_of(m))

    def inverse_vjp(self, m: int, y: Streams, dy: Streams, version: WeightVersion | None) -> tuple[Streams, Streams, Gradients]:
        """Return a reversible block's input, the gradient with respect to it, and those of the parameters.

        Args:
            version: Weights that reconstruct and are differentiated; None for the parameters.
        """
        assert self._reversible is not None
        if self._needs_no_context and version is None:
            return self._reversible.inverse_vjp(y, dy, seed=self._seed_of(m))
        with self._autocast(y[0]), self._cast(version), self.using(version):
            return self._reversible.inverse_vjp(y, dy, seed=self._seed_of(m))

    def begin_update(self) -> None:
        """Drop the casts of the parameters, because an update follows."""
        if self._casts is not None:
            self._casts.drop()

    def _cast(self, version: WeightVersion | None) -> AbstractContextManager[object]:
        """Return the context that replaces parameters by their casts. In the first evaluation, it finds which ones."""
        if self._casts is None or version is not None:
            return NOTHING
        if not self._watched:
            self._watched = True
            return self._casts.watch()
        return self._casts

    def using(self, version: WeightVersion | None) -> AbstractContextManager[None]:
        """Give the block's parameters the values of ``version`` inside the ``with`` block; None leaves them as they are."""
        return NOTHING if version is None else _replaced(self.parameters, version)

    def frozen_statistics(self) -> AbstractContextManager[None]:
        """Disable updates of running statistics inside the ``with`` block."""
        return frozen_statistics(self.normalisations) if self.normalisations else NOTHING

    def first_evaluation(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass that the backward pass repeats: running statistics don't move.

        The first one of a run checks that the block changes no other buffer (:class:`forbid_buffer_changes`).
        """
        if self._keeps_buffers:
            return self.frozen_statistics()
        self._keeps_buffers = True
        stack = ExitStack()
        stack.enter_context(self.frozen_statistics())
        stack.enter_context(forbid_buffer_changes(self.module, self.name))
        return stack

    @torch.no_grad()
    def evaluate(self, x: Streams) -> Streams:
        """Return the output without a graph, with the module in the mode that the caller has set."""
        with self._autocast(x[0]):
            return self._as_streams(self.module(*x), x[0])

    def _set_draws(self, draws: bool) -> None:
        self.draws = draws

    def _seed_of(self, m: int) -> int | None:
        return None if self.draws is False else derive_seed(self.seed, m)

    def _autocast(self, x: Tensor) -> AbstractContextManager[object]:
        return NOTHING if self.autocast is None else autocast_to(x.device.type, self.autocast)

    def _as_streams(self, y: Tensor | Streams, x: Tensor) -> Streams:
        """Return the outputs as a tuple, in the type of the input ``x``.

        All streams have one type, because reconstruction must subtract exactly what the forward pass added. With exact streams,
        the streams that a non-reversible block returns are rounded to the grid.
        """
        if self.autocast is None and self._grid is None:
            return as_streams(y)
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        streams = tuple(t.to(dtype) if t.dtype == self.autocast else t for t in as_streams(y))
        return streams if self._grid is None or len(streams) < 2 else tuple(self._grid.enter(t) for t in streams)


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
