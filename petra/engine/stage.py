"""A stage: consecutive blocks that one worker owns, and the gradients that they accumulate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from petra.engine.block import BlockRunner, Stash
from petra.hooks import Hooks
from petra.method import Keep, Weights
from petra.reversible import Grid, derive_seed
from petra.specs import Streams


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
        index: Number of the stage, from 0, for hooks.
        hooks: Hooks that observe the blocks.
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
        index: int = 0,
        hooks: Hooks | None = None,
    ) -> None:
        self.module, self.grid = nn.ModuleList(blocks), grid
        self.index, self.first_block, self.hooks = index, first_block, Hooks() if hooks is None else hooks
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
        for block, runner in enumerate(self.runners, self.first_block):
            for call in self.hooks.block_forward_begin:
                call(self.index, block, m, x)
            x = self._contiguous(runner.forward(m, x))
        return x

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams]:
        """B of microbatch m: adds 1/k of the parameters' gradients to ``.grad`` and returns (x̃, δ) of the stage's input.

        Args:
            y: the stage's output as the next stage holds or reconstructs it; empty if the last block keeps more than nothing.
            dy: the loss's gradient with respect to it.
        """
        for i in reversed(range(len(self.runners))):
            y, dy, gradients = self.runners[i].backward(m, y, dy)
            y, dy = self._contiguous(y), self._contiguous(dy)
            if gradients:
                torch._foreach_add_([p.grad for p in gradients], list(gradients.values()), alpha=1 / self.k)  # type: ignore[misc]
            for call in self.hooks.block_backward_end:
                call(self.index, self.first_block + i, m, y, gradients)
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
