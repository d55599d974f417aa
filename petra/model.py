"""A model as a list of blocks, each built on its own, so that a worker builds only what its stage owns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from petra.errors import ModelError, first_line
from petra.reversible import ReversibleBlock, derive_seed, seeded
from petra.specs import Streams, TensorSpec, as_streams


@dataclass(frozen=True)
class BlockSpec:
    """One block of a model: the smallest unit that a model is cut into.

    ``build`` returns a fresh module whose ``forward`` takes one positional tensor per stream and returns a tensor or a tuple of
    tensors. A :class:`petra.reversible.ReversibleBlock` needs no buffer in a pipeline; any other module holds its input.
    """

    name: str
    build: Callable[[], nn.Module]


@dataclass(frozen=True)
class BlockProfile:
    """What is known of a block without running it: the form of its output, its size and its cost."""

    name: str
    outputs: tuple[TensorSpec, ...]
    parameters: int
    flops: int
    """Of one forward of one microbatch."""
    reversible: bool
    exact: bool
    """Whether it is reversible and can keep its streams on a grid."""


@dataclass(frozen=True)
class Model:
    """A network as named blocks, from the one that takes the data to the one that returns the loss's input."""

    name: str
    blocks: tuple[BlockSpec, ...]

    @staticmethod
    def of(name: str, blocks: Mapping[str, nn.Module]) -> Model:
        """A model of modules that exist already, in their order, with the weights that they have.

        Every process makes all of them and must make them alike; each trains copies of those that its stages own. Builders
        instead (:class:`BlockSpec`) spare the rest, and take their weights from the seed of the run.
        """
        return Model(name, tuple(BlockSpec(key, partial(copy.deepcopy, module)) for key, module in blocks.items()))

    def build_block(self, index: int, seed: int) -> nn.Module:
        """Builds block ``index`` from its own seed, so that its weights don't depend on how the model is cut."""
        with seeded(derive_seed(seed, index)):
            return self.blocks[index].build()

    def build(self, seed: int) -> Chain:
        """The whole network as one ordinary module (export, plain training, reference)."""
        return Chain([(block.name, self.build_block(i, seed)) for i, block in enumerate(self.blocks)])

    def profile(self, inputs: TensorSpec) -> tuple[BlockProfile, ...]:
        """Shapes, parameters and FLOPs of every block, from tensors without data: no memory, no compute, no statistics moved.

        Raises:
            ModelError: a block can't take what the block before it returns; the text names both.
        """
        profiles: list[BlockProfile] = []
        try:
            streams: Streams = (torch.empty(inputs.shape, dtype=inputs.dtype, device="meta"),)
        except RuntimeError as error:
            raise ModelError(f"a microbatch of {inputs} can't be had: {first_line(error)}") from error
        for spec in self.blocks:
            counter = FlopCounterMode(display=False)
            try:
                with torch.device("meta"):
                    block = spec.build().to("meta")
            except (RuntimeError, ValueError, TypeError, OverflowError) as error:
                raise ModelError(f"block {spec.name} can't be built: {first_line(error)}") from error
            try:
                with torch.no_grad(), counter:
                    streams = as_streams(block(*streams))
            except (RuntimeError, ValueError, TypeError) as error:
                found = ", ".join(str(p) for p in profiles[-1].outputs) if profiles else str(inputs)
                source = f"block {profiles[-1].name}" if profiles else "the data"
                raise ModelError(f"block {spec.name} can't take {found} from {source}: {first_line(error)}") from error
            profiles.append(
                BlockProfile(
                    name=spec.name,
                    outputs=tuple(TensorSpec(tuple(t.shape), t.dtype) for t in streams),
                    parameters=sum(p.numel() for p in block.parameters()),
                    flops=counter.get_total_flops(),
                    reversible=isinstance(block, ReversibleBlock),
                    exact=isinstance(block, ReversibleBlock)
                    and type(block).enable_exact_streams is not ReversibleBlock.enable_exact_streams,
                )
            )
        return tuple(profiles)


class Chain(nn.Module):
    """Blocks applied one after another under plain autograd; keys of its state are ``<block name>.<key>``."""

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, block in blocks:
            self.add_module(name, block)

    def forward(self, x: Tensor) -> Tensor:
        streams: Streams = (x,)
        for block in self.children():
            streams = as_streams(block(*streams))
        (out,) = streams
        return out
