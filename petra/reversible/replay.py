"""Repeat an evaluation of F exactly: the same random numbers, and running statistics that are updated only once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from petra.errors import ModelError

_MASK = (1 << 64) - 1
_global_generators = threading.RLock()


def derive_seed(*parts: int) -> int:
    """Return a 63-bit seed for a tuple of integers, such as (run seed, block, microbatch).

    The function folds SplitMix64's finalizer (Steele, Lea, Flood 2014) over the parts. Different tuples give unrelated seeds, the
    same on every machine.
    """
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


# These contexts are entered several times per stage and microbatch. A class is twice as fast as a generator with @contextmanager.


class seeded:
    """Seed the global generators inside the ``with`` block and restore their states afterwards. ``seed=None`` does nothing."""

    __slots__ = ("_device", "_generators", "_seed", "_states")

    def __init__(self, seed: int | None, device: torch.device | None = None) -> None:
        self._seed, self._device = seed, device

    def __enter__(self) -> None:
        if self._seed is None:
            return
        self._generators = [torch.default_generator]
        device = self._device
        if device is not None and device.type == "cuda":
            own = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[own])
        _global_generators.acquire()  # other threads use the same generators
        self._states = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        if self._seed is None:
            return
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        _global_generators.release()


class forbid_inplace:
    """Check that ``module`` does not modify its inputs ``tensors`` in place, because other blocks may still need them.

    Raises:
        ModelError: If it does. The message names the module.
    """

    __slots__ = ("_module", "_tensors", "_versions")

    def __init__(self, tensors: Sequence[Tensor], module: nn.Module) -> None:
        self._tensors, self._module = tensors, module

    def __enter__(self) -> None:
        self._versions = [None if t.is_inference() else t._version for t in self._tensors]

    def __exit__(self, failed: object, *_: object) -> None:
        if failed:
            return
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if version is not None and tensor._version != version:
                raise ModelError(
                    f"{type(self._module).__name__} modifies its input in place, but other blocks still need this input; remove "
                    "the in-place operation (often inplace=True in the first layer)"
                )


def normalisations(module: nn.Module) -> list[_NormBase]:
    """Return the normalisation layers inside ``module`` that track running statistics."""
    return [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]


class frozen_statistics:
    """Disable updates of running statistics inside the ``with`` block. Layers in training mode still normalise by batch statistics.

    Used in the forward pass of blocks that the backward pass evaluates again, so that each microbatch updates the statistics once.
    """

    __slots__ = ("_buffers", "_training")

    def __init__(self, layers: Sequence[_NormBase]) -> None:
        self._training = [layer for layer in layers if layer.training]

    def __enter__(self) -> None:
        # Instance normalisation updates its statistics whatever track_running_stats says, unless it has none.
        self._buffers = [
            (layer, layer.running_mean, layer.running_var) for layer in self._training if isinstance(layer, _InstanceNorm)
        ]
        for layer in self._training:
            layer.track_running_stats = False
        for layer, *_ in self._buffers:
            layer.running_mean = layer.running_var = None

    def __exit__(self, *_: object) -> None:
        for layer in self._training:
            layer.track_running_stats = True
        for layer, mean, var in self._buffers:
            layer.running_mean, layer.running_var = mean, var
