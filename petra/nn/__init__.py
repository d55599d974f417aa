"""Layers that store fewer activations for the backward pass."""

from petra.nn.activation import Activation
from petra.nn.checkpoint import CheckpointedABNConv
from petra.nn.inplace_abn import InPlaceABN

__all__ = ["Activation", "CheckpointedABNConv", "InPlaceABN"]
