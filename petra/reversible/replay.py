"""Repeat an evaluation of F exactly: the same random numbers, and running statistics that are updated only once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from petra.errors import ModelError, require
from petra.torch_private import Dropout, NormBase, any_autocast, storage_key, version_counter

_MASK = (1 << 64) - 1
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
MAY_DRAW = (Dropout, nn.RReLU, nn.RNNBase, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
KNOWN = ("torch.nn.modules.", "petra.")
_global_generators = threading.RLock()
NOTHING: AbstractContextManager[None] = nullcontext()
"""Context that does nothing. A new one would take twice as long."""


def autocast_to(device: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Return a context that computes in ``dtype``, or without autocast if it is None.

    Casts are not cached: those cached under no_grad have no graph, so an evaluation that reused them would lose weights' gradients.

    Args:
        device: Type of the device, such as ``cpu``.
    """
    if dtype is None and not (any_autocast() and torch.is_autocast_enabled(device)):
        return NOTHING
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


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
        _global_generators.acquire()  # other threads use the same generators
        self._generators = _generators(self._device)
        self._states = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        if self._seed is None:
            return
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        _global_generators.release()


class watch_draws:
    """Find whether functions inside the ``with`` block use the global generators (:attr:`drew`), and restore their states."""

    __slots__ = ("_generators", "_states", "drew")

    def __init__(self, device: torch.device) -> None:
        self._generators = _generators(device)

    def __enter__(self) -> watch_draws:
        _global_generators.acquire()
        self._states = [generator.get_state() for generator in self._generators]
        return self

    def __exit__(self, *_: object) -> None:
        self.drew = False
        for generator, state in zip(self._generators, self._states, strict=True):
            if generator.get_state().numpy().tobytes() != state.numpy().tobytes():  # torch.equal takes three times as long
                self.drew = True
                generator.set_state(state)
        _global_generators.release()


def _generators(device: torch.device | None) -> Sequence[torch.Generator]:
    """Return the global generators that functions on a device use."""
    if device is None or device.type != "cuda":
        return (torch.default_generator,)
    own = torch.cuda.current_device() if device.index is None else device.index
    return torch.default_generator, torch.cuda.default_generators[own]


def may_draw(module: nn.Module) -> bool | None:
    """Return whether ``module`` may draw random numbers: False for layers of torch and petra that never do, True if one of them
    may, such as dropout (a rate of 0 may change during a run), and None for anybody else's module, hook or ``forward``.
    """
    if any(isinstance(m, MAY_DRAW) for m in module.modules()):
        return True
    return None if has_own_code(module) or any("forward" in vars(m) for m in module.modules()) else False


def has_own_code(module: nn.Module) -> bool:
    """Return whether ``module`` contains somebody else's module or hook than torch's or petra's."""
    return any(m._forward_hooks or m._forward_pre_hooks or not type(m).__module__.startswith(KNOWN) for m in module.modules())


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` or somebody else has replaced the function that a module calls."""
    return any({"forward", "_compiled_call_impl"} & vars(m).keys() for m in module.modules())


class forbid_inplace:
    """Check that the module ``name`` does not modify its inputs ``tensors`` in place: other blocks may still need them.

    Raises:
        ModelError: If it does. The message names the module.
    """

    __slots__ = ("_name", "_tensors", "_versions")

    def __init__(self, tensors: Sequence[Tensor], name: str) -> None:
        self._tensors, self._name = tensors, name

    def __enter__(self) -> None:
        self._versions = [version_counter(t) for t in self._tensors]

    def __exit__(self, failed: object, *_: object) -> None:
        if not failed and [version_counter(t) for t in self._tensors] != self._versions:
            raise modified(self._name)


def modified(name: str) -> ModelError:
    """Return the error of a module that modifies its input in place."""
    return ModelError(
        f"{name} modifies its input in place, but other blocks still need this input; remove "
        "the in-place operation (often inplace=True in the first layer)"
    )


class forbid_buffer_changes:
    """Check that a forward pass that will be repeated leaves parameters and buffers as they are: they would change twice.

    Running statistics of normalisations are not among these, inside of :class:`frozen_statistics`.

    Args:
        name: What messages call the module.

    Raises:
        ModelError: If one changes. The message names the module and the tensor.
    """

    __slots__ = ("_before", "_module", "_name", "_tensors")

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name

    def __enter__(self) -> None:
        self._tensors = dict(chain(self._module.named_parameters(), self._module.named_buffers()))  # so that no identity returns
        self._before = {name: (id(t), version_counter(t), storage_key(t)) for name, t in self._tensors.items()}

    def __exit__(self, failed: object, *_: object) -> None:
        if failed:
            return
        for name, t in chain(self._module.named_parameters(), self._module.named_buffers()):
            kind = "parameters" if isinstance(t, nn.Parameter) else "buffers"
            expected = f"{kind} that a forward pass leaves as they are, because the backward pass repeats it (or method.keep=graph)"
            same = self._before.get(name) == (id(t), version_counter(t), storage_key(t))
            require(same, self._name, expected, f"a change of {name}", ModelError)


def normalisations(module: nn.Module) -> list[NormBase]:
    """Return the normalisation layers inside ``module`` that track running statistics."""
    return [m for m in module.modules() if isinstance(m, NormBase) and m.track_running_stats]


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return the running means and variances, of shape (C,), of the normalisation layers inside ``module``."""
    return [t for layer in normalisations(module) for t in (layer.running_mean, layer.running_var) if t is not None]


class frozen_statistics:
    """Disable updates of running statistics inside the ``with`` block. Layers in training mode still normalise by batch statistics.

    Used in the forward pass of blocks that the backward pass evaluates again, so that each microbatch updates the statistics once.
    """

    __slots__ = ("_buffers", "_training")

    def __init__(self, layers: Sequence[NormBase]) -> None:
        self._training = [layer for layer in layers if layer.training]

    def __enter__(self) -> None:
        # Instance normalisation updates its statistics whatever track_running_stats says, unless it has none.
        self._buffers = [
            (layer, layer.running_mean, layer.running_var) for layer in self._training if isinstance(layer, INSTANCE_NORMS)
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
