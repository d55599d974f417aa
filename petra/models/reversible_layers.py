"""Layers of the reversible networks as modules, for :class:`petra.reversible.ReversibleSequence` in any training loop."""

from __future__ import annotations

from typing import Any

from petra.errors import require
from petra.models import layers
from petra.models.attention import MLP, Attention, LayerOptions
from petra.models.revnet import Downsample, branch
from petra.reversible import Coupling, TwoFunctionCoupling


class RevNetLayer(Coupling):
    """Block of :func:`petra.models.revnet18` or, with ``hidden``, of :func:`petra.models.revnet50`: (x1, x2) → (x2, x1 + F(x2)).

    Maps two streams (B, channels, H, W) to two streams of the same shape.

    Args:
        channels: Channels of each stream.
        hidden: Channels of the 3x3 convolution of a bottleneck. None: F has two 3x3 convolutions.
        norm, activation: As for :func:`petra.models.revnet18`.

    Raises:
        ConfigError: If an argument is out of range.
    """

    def __init__(self, channels: int, hidden: int | None = None, *, norm: str = "batchnorm", activation: str | None = None) -> None:
        fits = hidden is None or 1 <= hidden != channels
        require(fits, "hidden", f"None, or an integer >= 1 other than {channels}, the channels", hidden)
        row = layers.Residual("layer", channels, hidden or channels, channels, stride=1)
        super().__init__(branch(layers.Style.chosen(norm, activation), row))


class RevNetDownsample(Downsample):
    """Block between the layers of :func:`petra.models.revnet18`, which is not reversible: put it between two sequences.

    Maps two streams (B, in_channels, H, W) to two streams (B, channels, H/stride, W/stride).

    Args:
        in_channels, channels: Channels of each stream before and after.
        stride: Factor of the sides of the images.
        norm, activation: As for :func:`petra.models.revnet18`.

    Raises:
        ConfigError: If an argument is out of range.
    """

    def __init__(
        self, in_channels: int, channels: int, stride: int = 2, *, norm: str = "batchnorm", activation: str | None = None
    ) -> None:
        row = layers.Residual("layer", in_channels, channels, channels, stride)
        super().__init__(layers.Style.chosen(norm, activation), row)


class RevGPTLayer(TwoFunctionCoupling):
    """Layer of :func:`petra.models.revgpt`: y1 = x1 + attention(x2), y2 = x2 + MLP(y1), with causal attention.

    Maps two streams (B, T, dim) to two streams of the same shape.

    Args:
        dim: Size of a token's vector, a multiple of ``heads``.
        heads: Number of attention heads.
        depth: Number of layers of the network, on which initial weights depend.
        options: Other fields of :class:`petra.models.attention.LayerOptions`, such as ``mlp``, ``rotary`` and ``dropout``.

    Raises:
        ConfigError: If an argument is out of range.
    """

    def __init__(self, dim: int, heads: int, *, depth: int = 1, **options: Any) -> None:
        form = LayerOptions(dim, heads, depth=depth, **options)
        super().__init__(Attention(form), MLP(form))


class RevViTLayer(RevGPTLayer):
    """Layer of a reversible vision transformer (Mangalam et al. 2022, section 3.2): a :class:`RevGPTLayer` with full attention."""

    def __init__(self, dim: int, heads: int, *, depth: int = 1, **options: Any) -> None:
        super().__init__(dim, heads, depth=depth, causal=False, **options)
