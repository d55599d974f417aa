"""Reversible sequences of petra and of other libraries, checkpointing, and ordinary autograd, built from the same functions F.

Each takes both streams, concatenated along the first dimension, and returns (y1, y2) of the same couplings with the same gradients.
This layout keeps the halves of every library contiguous.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from petra.reversible import Coupling, ReversibleSequence

Forward = Callable[[Tensor], tuple[Tensor, ...]]


def petra(branches: Sequence[nn.Module]) -> Forward:
    """Use :class:`petra.reversible.ReversibleSequence`."""
    sequence = ReversibleSequence(Coupling(f) for f in branches)
    return lambda x: sequence(*x.chunk(2))


def plain(branches: Sequence[nn.Module]) -> Forward:
    """Use ordinary autograd, which stores all activations."""

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        x1, x2 = x.chunk(2)
        for f in branches:
            x1, x2 = x2, x1 + f(x2)
        return x1, x2

    return forward


def checkpointed(branches: Sequence[nn.Module]) -> Forward:
    """Checkpoint each block, so that one stream per block and one graph at a time are stored."""

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        x1, x2 = x.chunk(2)
        for f in branches:
            x1, x2 = x2, x1 + checkpoint(f, x2, use_reentrant=False)
        return x1, x2

    return forward


def revtorch(branches: Sequence[nn.Module]) -> Forward:
    """Use RevTorch."""
    from revtorch import ReversibleBlock
    from revtorch import ReversibleSequence as Sequence_

    pairs = zip(branches[::2], branches[1::2], strict=True)
    sequence = Sequence_(nn.ModuleList(ReversibleBlock(f, g, split_along_dim=0) for f, g in pairs))
    return lambda x: sequence(x).chunk(2)


def revlib(branches: Sequence[nn.Module]) -> Forward:
    """Use RevLib."""
    from revlib import ReversibleSequential

    sequence = ReversibleSequential(*branches, split_dim=0)
    return lambda x: sequence(x).chunk(2)


def memcnn(branches: Sequence[nn.Module]) -> Forward:
    """Use MemCNN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from memcnn import AdditiveCoupling, InvertibleModuleWrapper

    pairs = zip(branches[::2], branches[1::2], strict=True)
    wrapped = [
        InvertibleModuleWrapper(AdditiveCoupling(f, g, split_dim=0), keep_input=i == 0)  # otherwise it would free the data
        for i, (f, g) in enumerate(pairs)
    ]
    sequence = nn.Sequential(*wrapped)

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # storage() is deprecated, once per block
            y: Tensor = sequence(x)
        return y.chunk(2)

    return forward


PEERS: dict[str, Callable[[Sequence[nn.Module]], Forward]] = {
    "petra": petra,
    "plain autograd": plain,
    "torch.utils.checkpoint": checkpointed,
    "RevTorch": revtorch,
    "RevLib": revlib,
    "memcnn": memcnn,
}
LIBRARIES = ("RevTorch", "RevLib", "memcnn")


def gradients(name: str, branches: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Return the gradients of all parameters after one step, as one vector."""
    parameters = [p for f in branches for p in f.parameters()]
    for p in parameters:
        p.grad = None
    step(PEERS[name](branches), x)
    return torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]


def step(forward: Forward, x: Tensor) -> None:
    """Run one forward and backward. The input requires a gradient, like the output of a stem."""
    y1, y2 = forward(x.detach().requires_grad_())
    (y1.square().mean() + 2 * y2.square().mean()).backward()
