"""A model as a list of blocks. Each block is built on its own, so a worker builds only the blocks of its stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from petra.errors import ModelError, first_line, invalid
from petra.reversible import ReversibleBlock, derive_seed, seeded
from petra.specs import Streams, TensorSpec, as_streams


@dataclass(frozen=True)
class BlockSpec:
    """One block of a model: the smallest unit of a partition into stages.

    Attributes:
        name: Name of the block, unique in the model. Prefix of its keys in state dictionaries.
        build: Function that returns a new module. The module's ``forward`` takes one positional tensor per stream and returns a
            tensor or a tuple of tensors. A pipeline stores nothing for a :class:`petra.reversible.ReversibleBlock`, and the input
            for any other module.
    """

    name: str
    build: Callable[[], nn.Module]

    @property
    def kind(self) -> Hashable:
        """A key that blocks share if the same function with the same arguments builds them."""
        build = self.build
        key = (build.func, build.args, frozenset(build.keywords.items())) if isinstance(build, partial) else build
        try:
            hash(key)
        except TypeError:
            return id(build)
        return key


@dataclass(frozen=True)
class BlockProfile:
    """Shapes, size and cost of a block, computed without data.

    Attributes:
        name: Name of the block.
        outputs: Shape and type of each output tensor for one microbatch.
        parameters: Number of parameters.
        flops: Floating-point operations of one forward of one microbatch.
        reversible: Whether the block is a :class:`petra.reversible.ReversibleBlock`.
        exact: Whether the block is reversible and supports exact streams (:mod:`petra.reversible.grid`).
    """

    name: str
    outputs: tuple[TensorSpec, ...]
    parameters: int
    flops: int
    reversible: bool
    exact: bool


@dataclass(frozen=True)
class Model:
    """A network as a sequence of named blocks. The first takes the data, and the last returns the input of the loss.

    Attributes:
        name: Name of the model in messages and records.
        blocks: The blocks in order.
    """

    name: str
    blocks: tuple[BlockSpec, ...]

    @staticmethod
    def of(name: str, blocks: Mapping[str, nn.Module]) -> Model:
        """Make a model from existing modules, in their order and with their weights.

        Every process must create all modules with the same weights, although it trains only copies of those that its stages own.
        Use :class:`BlockSpec` instead if a process should create only its own modules, with weights derived from the run's seed.

        Args:
            name: Name of the model.
            blocks: Modules by block name.
        """
        return Model(name, tuple(BlockSpec(key, partial(copy.deepcopy, module)) for key, module in blocks.items()))

    def build_block(self, index: int, seed: int) -> nn.Module:
        """Build block ``index`` with a seed of its own, so that its weights don't depend on the partition into stages."""
        with seeded(derive_seed(seed, index)):
            return self.blocks[index].build()

    def build(self, seed: int) -> Chain:
        """Build the whole network as one module, for export or for training without a pipeline."""
        return Chain([(block.name, self.build_block(i, seed)) for i, block in enumerate(self.blocks)])

    def profile(self, inputs: TensorSpec) -> tuple[BlockProfile, ...]:
        """Compute shapes, parameters and FLOPs of every block on the meta device.

        This allocates no memory for tensors, runs no kernel, and changes no running statistics. Blocks that the same function
        with the same arguments builds are profiled once for each form of their input.

        Args:
            inputs: Shape and type of a microbatch of inputs.

        Raises:
            ModelError: If no tensor has the shape ``inputs``, if building a block fails, or if a block does not accept the output
                of the block before it. The message names both blocks.
        """
        try:
            streams: Streams = (torch.empty(inputs.shape, dtype=inputs.dtype, device="meta"),)
        except RuntimeError as error:
            raise invalid("inputs", "a shape that a tensor can have", f"{inputs} ({first_line(error)})", ModelError) from error
        profiles: list[BlockProfile] = []
        known: dict[Hashable, BlockProfile] = {}
        for spec in self.blocks:
            key = (spec.kind, tuple(TensorSpec(tuple(t.shape), t.dtype) for t in streams))
            if key not in known:
                source = (
                    f"{', '.join(map(str, profiles[-1].outputs))} from block {profiles[-1].name}"
                    if profiles
                    else f"{inputs} from the data"
                )
                known[key] = _profile_block(spec, streams, source)
            profiles.append(replace(known[key], name=spec.name))
            streams = tuple(torch.empty(out.shape, dtype=out.dtype, device="meta") for out in known[key].outputs)
        return tuple(profiles)


def _profile_block(spec: BlockSpec, streams: Streams, given: str) -> BlockProfile:
    """Compute the profile of one block.

    Args:
        streams: Its input, on the meta device.
        given: Description of the input and its source, for error messages.

    Raises:
        ModelError: If building the block fails, or if it does not accept the input.
    """
    counter = FlopCounterMode(display=False)
    try:
        with torch.device("meta"):
            block = spec.build().to("meta")
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        got = f"an error when it is built ({first_line(error)})"
        raise invalid(f"block {spec.name}", "a module", got, ModelError) from error
    try:
        with torch.no_grad(), counter:
            outputs = as_streams(block(*streams))
    except (RuntimeError, ValueError, TypeError) as error:
        raise invalid(f"block {spec.name}", "an input that it accepts", f"{given} ({first_line(error)})", ModelError) from error
    return BlockProfile(
        name=spec.name,
        outputs=tuple(TensorSpec(tuple(t.shape), t.dtype) for t in outputs),
        parameters=sum(p.numel() for p in block.parameters()),
        flops=counter.get_total_flops(),
        reversible=isinstance(block, ReversibleBlock),
        exact=isinstance(block, ReversibleBlock) and type(block).enable_exact_streams is not ReversibleBlock.enable_exact_streams,
    )


class Chain(nn.Module):
    """Blocks applied one after another with ordinary autograd. Keys of its state dictionary are ``<block name>.<key>``.

    Args:
        blocks: Name and module of each block.
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, block in blocks:
            self.add_module(name, block)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last block for the input ``x`` of the first."""
        streams: Streams = (x,)
        for block in self.children():
            streams = as_streams(block(*streams))
        (out,) = streams
        return out
