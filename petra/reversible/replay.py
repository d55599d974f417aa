"""What makes F in the backward pass compute what it computed in the forward pass: random numbers and batch statistics."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from petra.errors import ModelError

_MASK = (1 << 64) - 1
_global_generators = threading.RLock()


def derive_seed(*parts: int) -> int:
    """One 63-bit seed from several integers, such as (run seed, block, microbatch).

    SplitMix64's finaliser (Steele, Lea, Flood 2014) folded over the parts: different tuples give unrelated seeds, on every machine.
    """
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@contextmanager
def seeded(seed: int | None, device: torch.device | None = None) -> Iterator[None]:
    """Draws inside from generators seeded with ``seed`` and puts the global ones back afterwards; ``None`` changes nothing."""
    if seed is None:
        yield
        return
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index])
    with _global_generators:  # they are everybody's, other threads' too
        states = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


@contextmanager
def unchanged(tensors: Sequence[Tensor], module: nn.Module) -> Iterator[None]:
    """Refuses a module that writes into its input: someone else holds that, or it is another stream too.

    Raises:
        ModelError: it does; the text names the module.
    """
    versions = [None if t.is_inference() else t._version for t in tensors]
    yield
    for tensor, version in zip(tensors, versions, strict=True):
        if version is not None and tensor._version != version:
            raise ModelError(
                f"{type(module).__name__} changes its input in place, which others still need; "
                "it must leave it as it is (check inplace=True of its first layer)"
            )


def normalisations(module: nn.Module) -> list[_NormBase]:
    """The layers inside that keep running statistics."""
    return [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]


@contextmanager
def frozen_statistics(layers: Sequence[_NormBase]) -> Iterator[None]:
    """Normalisation layers use batch statistics as in training but leave their running statistics alone.

    For the forward pass of a block that is evaluated again in the backward pass: statistics then move once per microbatch.
    """
    training = [layer for layer in layers if layer.training]
    for layer in training:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in training:
            layer.track_running_stats = True
