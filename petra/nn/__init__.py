"""Layers that keep less between forward and backward."""

from petra.nn.activation import Activation
from petra.nn.checkpoint import CheckpointedABNConv
from petra.nn.inplace_abn import InPlaceABN

__all__ = ["Activation", "CheckpointedABNConv", "InPlaceABN"]
