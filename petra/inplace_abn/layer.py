"""In-place activated batch normalisation (Rota Bulò, Porzi, Kontschieder 2018).

BatchNorm followed by an activation stores two tensors for the backward pass. This layer stores one: the output z overwrites the
input x. The backward pass inverts the activation, y = φ⁻¹(z), and the affine map, x̂ = (y − β) / γ (section 3).
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from petra.errors import first_line, require
from petra.inplace_abn.normalise import away_from_zero, check_input, normalise, normalise_backward
from petra.models.layers import LEAK
from petra.torch_private import NormBase, is_view


class InPlaceABN(NormBase):
    """Batch normalisation and activation: z = φ(γ x̂ + β), where x̂ is the normalised input (B, C, ...). Overwrites the input.

    No other operation may need the input. Place the layer after a convolution, whose backward does not use its own output. An
    operation that reads the input afterwards raises an error, and so does the backward pass of one that has stored it. Only
    results of operations that autograd records are overwritten: no data of the caller, no views, and nothing in evaluation
    without gradients, where nothing is stored.

    Parameters, buffers and state dictionary are those of :class:`torch.nn.BatchNorm2d`, and so are results as long as
    |γ| >= ``eps``. Smaller γ are replaced by ±``eps``, since the affine map would not be invertible. They still get their
    gradient. Double backward is not supported.

    Args:
        channels: Number of channels C.
        slope: Slope of the activation φ, a leaky ReLU, for negative inputs: > 0 and <= 1; 1 for no activation.
        overwrite: Whether to write the output over the input. Set False if another operation needs the input. The layer does not
            store the input in either case.
        group: Process group that shares batch statistics. Each process gets the gradients of its own part of the batch, so
            gradients of parameters must be summed over the group. None: each process uses its own batch.
        synchronized: Whether a pipeline with replicas shares batch statistics over the replicas of a stage, by setting ``group``.
        eps, momentum: As in :class:`torch.nn.BatchNorm2d`.

    Raises:
        ConfigError: If an argument is out of range.
        ModelError: In ``forward``, if the input is not a floating-point tensor (B, C, ...), or if it has a single value per
            channel in training.
    """

    def __init__(
        self,
        channels: int,
        slope: float = 0.01,
        *,
        overwrite: bool = True,
        group: dist.ProcessGroup | None = None,
        synchronized: bool = False,
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        require(0 < slope <= 1, "slope", "a number > 0 and <= 1", slope)
        super().__init__(channels, eps, momentum)
        self.slope, self.overwrite, self.group, self.synchronized = slope, overwrite, group, synchronized

    def forward(self, x: Tensor) -> Tensor:
        """Return z, in the memory of ``x`` if ``overwrite`` is set."""
        check_input(self, x, self.group, alone=not (self.synchronized and x.is_meta))  # a model is profiled before it has a group
        overwrite = self.overwrite and torch.is_grad_enabled() and x.grad_fn is not None and not is_view(x)
        z: Tensor = _InPlaceABN.apply(self, overwrite, x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        if overwrite and type(x) is Tensor and not torch.compiler.is_compiling():
            x.__class__ = Overwritten
        return z

    def join_replicas(self, group: dist.ProcessGroup) -> None:
        """Share batch statistics over the replicas of a stage, if the layer is ``synchronized``."""
        if self.synchronized:
            self.group = group

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, slope={self.slope}"  # type: ignore[no-untyped-call]


ATTRIBUTES = {"__get__", "__hash__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "is_floating_point"}
ATTRIBUTES |= {"is_inference", "numel", "register_hook", "size", "stride", "type", "untyped_storage"}
"""Functions of a tensor that don't read its values. ``__get__`` reads an attribute."""


class Overwritten(Tensor):
    """A tensor that :class:`InPlaceABN` has overwritten. Its shape and other attributes can be read, but not its values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Evaluate a function that reads an attribute.

        Raises:
            RuntimeError: If the function is another one.
        """
        name = func.__name__
        if name in ATTRIBUTES:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise RuntimeError(
            f"{name} reads a tensor that has been modified by an inplace operation: InPlaceABN has written its output over its "
            "input; give that layer overwrite=False"
        )


def norm_act(channels: int, activation: str | None, overwrite: bool, *, synchronized: bool = False) -> list[nn.Module]:
    """Build the layer for :data:`petra.models.layers.NORMS`."""
    norm = InPlaceABN(channels, 1.0 if activation is None else LEAK, overwrite=overwrite, synchronized=synchronized)
    # The identity takes the place of the activation, so that state dictionaries have the same keys with every norm.
    return [norm, *([] if activation is None else [nn.Identity()])]


class _InPlaceABN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: InPlaceABN, overwrite: bool, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        # Copies: backward needs these values even if an optimizer changes the parameters in between.
        scale, shift = away_from_zero(weight, layer.eps), bias.clone()
        z = x.detach() if overwrite else torch.empty_like(x)  # shares memory and version counter, so autograd sees the change
        ctx.layer, ctx.statistics = layer, normalise(layer, x, z, scale, shift, layer.group)
        if layer.slope != 1:
            F.leaky_relu_(z, layer.slope)
        ctx.save_for_backward(z, scale, shift, weight)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        slope, statistics = ctx.layer.slope, ctx.statistics
        z, scale, shift, weight = ctx.saved_tensors
        rate = away_from_zero(weight, ctx.layer.eps) * statistics.invstd
        rest = scale, shift, rate, statistics, ctx.needs_input_grad[2]
        if (kernels := _kernels(z)) is not None:
            return None, None, *kernels.backward(dz, z, slope, *rest)
        if slope == 1:
            return None, None, *normalise_backward(dz, z, *rest)
        dy = torch.ops.aten.leaky_relu_backward(dz, z, slope, True)
        return None, None, *normalise_backward(dy, F.leaky_relu(z, 1 / slope), *rest)


def _kernels(z: Tensor) -> ModuleType | None:
    """Return the module of fused kernels if they support ``z``: a dense CUDA tensor, with Triton installed."""
    if not z.is_cuda or importlib.util.find_spec("triton") is None:
        return None
    kernels = _compiled_kernels(z.device)
    return kernels if kernels is not None and kernels.supports(z) else None


@cache
def _compiled_kernels(device: torch.device) -> ModuleType | None:
    """Return the module of fused kernels, or None with a warning if Triton can't compile them.

    Triton compiles a launcher with the C compiler and the headers of Python, which a machine may lack.
    """
    try:
        kernels = importlib.import_module("petra.inplace_abn.kernels")
        kernels.trial(device)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        warnings.warn(f"InPlaceABN uses plain operations, because Triton can't compile its kernels ({reason})", stacklevel=2)
        return None
    return kernels
