"""``torch.compile`` for blocks: for the functions F and G of a reversible block, and for any other block as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from petra.engine.accumulation import Accumulation
from petra.engine.block import Recompute, WrappedRunner
from petra.engine.options.checked_inverse import own_buffers
from petra.engine.stage import Stage, evaluating
from petra.hooks import Hook
from petra.plan import Plan
from petra.reversible import ReversibleBlock
from petra.specs import Streams, without_side
from petra.torch_private import set_recompile_limit

RECOMPILE_LIMIT = 64
"""Number of variants that ``torch.compile`` may make of one code object.

All modules share a few code objects of PyTorch. They need a variant for each shape, with and without graph, with frozen running
statistics, and for evaluation. PyTorch's default of 8 would leave most of a network uncompiled."""


MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes of inductor."""
WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that replay CUDA graphs on a GPU."""


def compile_block(block: nn.Module, compiler: str | Callable[..., object]) -> None:
    """Compile a block in place when it is first called. Names and values in its state dict don't change.

    Args:
        compiler: A backend of ``torch.compile``, or one of :data:`MODES`.

    The forward pass, inverse and vector-Jacobian product of a reversible block call its functions, so those are compiled.
    ``Module.compile`` would leave an ``nn.Sequential`` as it is, because torch does not compile its own modules' frames.
    """
    set_recompile_limit(RECOMPILE_LIMIT)
    for part in block.children() if isinstance(block, ReversibleBlock) else (block,):
        chosen = {"mode": compiler} if compiler in MODES else {"backend": compiler}
        compiled = torch.compile(part.forward, dynamic=False, **chosen)
        part.forward = partial(_cloned, compiled) if compiler in WITH_CUDA_GRAPHS else compiled


def _cloned(function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Return copies of a function's outputs. The next replay of a CUDA graph overwrites them, and other microbatches need them."""
    y = function(*inputs)
    return y.clone() if isinstance(y, Tensor) else tuple(t.clone() for t in y)


class WarmUp(Hook):
    """Compiles the blocks of this process before the first message of its first training run, in all processes at once.

    Without it, a process compiles when its first message arrives, so the last process waits for the sum of all times. The passes of
    training and evaluation run once on zeros. Weights, gradients, buffers and generators keep their values.

    Args:
        plan: Plan of the run.
        stages: Stages of this process, by index.
        device: Device of this process.
    """

    def __init__(self, plan: Plan, stages: Mapping[int, Stage], device: torch.device) -> None:
        self._plan, self._stages, self._device = plan, dict(stages), device

    @torch.no_grad()  # as in the executor
    def train_begin(self, start: int, stop: int) -> None:
        for j, stage in self._stages.items():
            specs = self._plan.boundaries[j - 1].forward[0] if j else (self._plan.layout.inputs,)
            x = stage.contiguous(tuple(torch.zeros(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs))
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []), _unchanged(stage, x):
                y = stage.forward(-1, x)
                stage.backward(-1, y, tuple(torch.zeros_like(t) for t in without_side(y)))
                with evaluating([stage]):
                    stage.evaluate(x)
        self._stages.clear()


class _NotAdded(Accumulation):
    """Gradients that are not added to ``.grad``."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(), 1)

    def add(self, block: int, gradients: object) -> None:
        pass


@contextmanager
def _unchanged(stage: Stage, x: Streams) -> Iterator[None]:
    """Restore what passes change besides what a run resets when it begins. Inputs that are fetched again are ``x``."""
    gradients, runners = stage.gradients, stage.runners
    inner = [runner.inner if isinstance(runner, WrappedRunner) else runner for runner in runners]
    fetching = [(runner, runner.fetch) for runner in inner if isinstance(runner, Recompute) and runner.fetch is not None]
    buffers = own_buffers(stage.module)
    values = [buffer.clone() for *_, buffer in buffers]
    stage.gradients, stage.runners = _NotAdded(), inner
    for runner, _ in fetching:
        runner.fetch = lambda m: x
    try:
        yield
    finally:
        stage.gradients, stage.runners = gradients, runners
        for runner, fetch in fetching:
            runner.fetch = fetch
        for (layer, name, buffer), value in zip(buffers, values, strict=True):
            setattr(layer, name, buffer.copy_(value))
