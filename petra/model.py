"""A model as a list of blocks. Each block is built on its own, so a worker builds only the blocks of its stages."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from petra.errors import ModelError, first_line, invalid, require
from petra.reversible import ReversibleBlock, ReversibleSequence, derive_seed, frozen_statistics, normalisations, seeded
from petra.specs import Streams, TensorSpec, as_streams, is_side, without_side
from petra.torch_private import TorchDispatchMode, hooks_of, module_hooks


@dataclass(frozen=True)
class BlockSpec:
    """One block of a model: the smallest unit of a partition into stages.

    Attributes:
        name: Name of the block, unique in the model, without ``.`` and ``/``. Prefix of its keys in state dictionaries.
        build: Function that returns a new module. The module's ``forward`` takes one positional tensor per stream and returns a
            tensor or a tuple of tensors. A pipeline stores nothing for a :class:`petra.reversible.ReversibleBlock`, and the input
            for any other module.

    Raises:
        ModelError: If ``name`` is no text, or ``build`` is no function.
    """

    name: str
    build: Callable[[], nn.Module]

    def __post_init__(self) -> None:
        require(isinstance(self.name, str), "name of a block", "a text", repr(self.name), ModelError)
        got = f"a module, {type(self.build).__name__}" if isinstance(self.build, nn.Module) else repr(self.build)
        function = callable(self.build) and not isinstance(self.build, nn.Module)
        require(function, f"build of block {self.name}", "a function that returns a module (Model.of takes them)", got, ModelError)

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
        trained: Number of those that are trained.
        flops: Floating-point operations of one forward of one microbatch.
        reversible: Whether the block is a :class:`petra.reversible.ReversibleBlock`.
        exact: Whether the block is reversible and supports exact streams (:mod:`petra.reversible.grid`).
    """

    name: str
    outputs: tuple[TensorSpec, ...]
    parameters: int
    trained: int
    flops: int
    reversible: bool
    exact: bool


@dataclass(frozen=True)
class Model:
    """A network as a sequence of named blocks. The first takes the data, and the last returns the input of the loss.

    Attributes:
        name: Name of the model in messages and records.
        blocks: The blocks in order.

    Raises:
        ModelError: If there is no block, if an entry is no :class:`BlockSpec`, or if a block's name occurs twice or can't be the
            prefix of keys.
    """

    name: str
    blocks: tuple[BlockSpec, ...]

    def __post_init__(self) -> None:
        require(isinstance(self.name, str), "name of a model", "a text", repr(self.name), ModelError)
        specs = isinstance(self.blocks, list | tuple) and all(isinstance(block, BlockSpec) for block in self.blocks)
        expected = "a tuple of petra.BlockSpec (Model.of takes modules)"
        require(specs, f"blocks of model {self.name}", expected, type(self.blocks).__name__, ModelError)
        object.__setattr__(self, "blocks", tuple(self.blocks))
        require(len(self.blocks) > 0, f"model {self.name}", "at least one block", "none", ModelError)
        seen = set[str]()
        for name in (block.name for block in self.blocks):
            usable = bool(name) and not {".", "/"} & {*name} and not hasattr(nn.Module, name)
            expected = "a name without '.' and '/' that is no attribute of nn.Module"
            require(usable, f"block {name!r} of model {self.name}", expected, f"{name!r}", ModelError)
            require(name not in seen, f"block {name!r} of model {self.name}", "a name that occurs once", "it twice", ModelError)
            seen.add(name)

    @staticmethod
    def of(name: str, blocks: nn.Sequential | Mapping[str, nn.Module]) -> Model:
        """Make a model from existing modules, in their order and with their weights.

        Every process must create all modules with the same weights, although it trains only copies of those that its stages own.
        Use :class:`BlockSpec` instead if a process should create only its own modules, with weights derived from the run's seed.

        Args:
            name: Name of the model.
            blocks: Modules by block name, or an ``nn.Sequential``, each of whose modules becomes a block. A
                :class:`petra.reversible.ReversibleSequence` named ``layers`` becomes the blocks ``layers_0``, ``layers_1``, ...

        Raises:
            ModelError: If a block is no module, contains one of TorchScript, or has parameters without a shape; if blocks share
                parameters or buffers, which would become independent copies; if every module is in evaluation mode; or if
                ``blocks`` lacks modules that occur twice, as the result of ``named_children()`` does.
        """
        what, kind = f"blocks of model {name}", type(blocks).__name__
        if isinstance(blocks, nn.Sequential):
            plain = getattr(blocks.forward, "__func__", None) in (nn.Sequential.forward, Chain.forward) and not module_hooks(blocks)
            require(plain, what, "an nn.Sequential without a forward or hooks of its own (or modules by name)", kind, ModelError)
            modules = {str(i): module for i, module in enumerate(blocks)}
        else:
            require(isinstance(blocks, Mapping), what, "an nn.Sequential or modules by name", kind, ModelError)
            for key in blocks:
                require(isinstance(key, str), what, "names that are texts", repr(key), ModelError)
            modules = dict(blocks)
            if all(key.isdigit() for key in modules) and [*modules] != [str(i) for i in range(len(modules))]:
                expected = "consecutive numbers (pass the nn.Sequential itself, as named_children() omits modules that occur twice)"
                raise invalid(what, expected, ", ".join(modules), ModelError)
        for key, module in modules.items():
            _check_module(f"block {key} of model {name}", module)
        parts = [part for key, module in modules.items() for part in _parts(key, module)]
        modules = dict(parts)
        require(len(modules) == len(parts), what, "names that occur once", ", ".join(key for key, _ in parts), ModelError)
        _check_distinct(name, modules)
        modes = {m.training for module in modules.values() for m in module.modules()}
        expected = "modules in training mode (call .train(); .eval() freezes layers)"
        require(modes != {False}, f"model {name}", expected, "none", ModelError)
        return Model(name, tuple(BlockSpec(key, partial(copied, module)) for key, module in modules.items()))

    def build_block(self, index: int, seed: int) -> nn.Module:
        """Build block ``index`` with a seed of its own, so that its weights don't depend on the partition into stages."""
        with seeded(derive_seed(seed, index)):
            return self.blocks[index].build()

    def build(self, seed: int) -> Chain:
        """Build the whole network as one module, for export or for training without a pipeline."""
        return Chain(OrderedDict((block.name, self.build_block(i, seed)) for i, block in enumerate(self.blocks)))

    def profile(self, inputs: TensorSpec) -> tuple[BlockProfile, ...]:
        """Compute shapes, parameters and FLOPs of every block on the meta device, or on the CPU if it can't run there.

        The meta device allocates no memory for tensors and runs no kernel. Blocks that the same function with the same arguments
        builds are profiled once for each form of their input.

        Args:
            inputs: Shape and type of a microbatch of inputs.

        Raises:
            ModelError: If no tensor has the shape ``inputs``, if building a block fails, if a block does not accept the output
                of the block before it (the message names both blocks), or if its output is not one or several floating-point
                tensors and then any side tensors, or if two blocks share parameters or buffers.
        """
        try:
            streams: Streams = (torch.empty(inputs.shape, dtype=inputs.dtype, device="meta"),)
        except RuntimeError as error:
            raise invalid("inputs", "a shape that a tensor can have", f"{inputs} ({first_line(error)})", ModelError) from error
        profiles: list[BlockProfile] = []
        known: dict[Hashable, tuple[BlockProfile, Streams]] = {}
        built, kinds = dict[str, nn.Module](), Counter[Hashable]()
        for spec in self.blocks:
            kinds[spec.kind] += 1
            key = (spec.kind, tuple(TensorSpec(tuple(t.shape), t.dtype) for t in streams))
            if key not in known or kinds[spec.kind] == 2:  # two blocks of a kind show whether that kind shares tensors
                given = ", ".join(str(p) for p in profiles[-1].outputs) if profiles else str(inputs)
                source = f"block {profiles[-1].name}" if profiles else "the data"
                try:
                    built[spec.name], known[key] = _profile_block(spec, streams, f"{given} from {source}", "meta")
                except ModelError as error:  # a block that reads values, or has tensors or generators of its own
                    if "meta" not in str(error).lower():
                        raise
                    built[spec.name], known[key] = _profile_block(spec, streams, f"{given} from {source}", "cpu")
            profile, streams = known[key]
            profiles.append(replace(profile, name=spec.name))
        _check_distinct(self.name, built)
        return tuple(profiles)


def _parts(key: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a reversible sequence by name, or the module itself. A sequence with hooks stays whole: they are its."""
    if type(module) is not ReversibleSequence or not module.blocks or module_hooks(module):
        return [(key, module)]
    return [(f"{key}_{i}", block) for i, block in enumerate(module.blocks)]


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module with the hooks and attributes of its parameters, which ``copy.deepcopy`` drops.

    Hooks that are methods of a copied module are bound to its copy.
    """
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(module, memo)
    for parameter, own in zip(module.parameters(), copied.parameters(), strict=True):
        vars(own).update(vars(parameter))  # marks by which optimizers group
        missing = parameter.requires_grad and not any(hooks_of(own))  # a __deepcopy__ of the module's own may copy hooks
        for register, found in zip((own.register_hook, own.register_post_accumulate_grad_hook), hooks_of(parameter), strict=True):
            for hook in found if missing else ():
                owner = id(hook.__self__) if isinstance(hook, MethodType) else None
                register(MethodType(hook.__func__, memo[owner]) if owner in memo else hook)  # type: ignore[attr-defined, no-untyped-call]
    return copied


def _build_on(device: str, spec: BlockSpec) -> nn.Module:
    """Build a block on a device. Raise a ModelError that says why if this fails."""
    try:
        with seeded(0), torch.device(device):
            module = spec.build()
            _check_module(f"block {spec.name}", module)
            if any(not t.is_meta for t in (*module.parameters(), *module.buffers())):
                _require_new(spec, module)
            return module.to(device)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        got = f"an error when it is built ({first_line(error)})"
        raise invalid(f"block {spec.name}", "a function that builds it", got, ModelError) from error


def _check_module(name: str, module: object) -> None:
    """Check that a block is a module whose tensors can be copied, moved and differentiated one by one.

    Raises:
        ModelError: If it is no module, contains one of TorchScript, or has tensors without a shape.
    """
    require(isinstance(module, nn.Module), name, "a module", type(module).__name__, ModelError)
    assert isinstance(module, nn.Module)
    scripted = [key for key, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    expected = "modules of Python (Runtime.compile compiles them)"
    require(not scripted, name, expected, f"TorchScript in {scripted[0] or 'the whole block'}" if scripted else "", ModelError)
    lazy = [key for key, t in chain(module.named_parameters(), module.named_buffers()) if is_lazy(t)]
    expected = "tensors with shapes (call a lazy module once, before Model.of or in its builder)"
    require(not lazy, name, expected, f"{', '.join(lazy)} without", ModelError)


def _require_new(spec: BlockSpec, module: nn.Module) -> None:
    """Check that a block's function builds a new module at each call: moving one to the meta device loses its weights.

    Raises:
        ModelError: If it returns modules or parameters that it has returned before. Tensors of buffers may be the same.
    """
    again = spec.build()
    before = {id(part) for part in (*module.modules(), *module.parameters())}
    if any(id(part) in before for part in (*again.modules(), *again.parameters())):
        expected = "a function that builds a new module at each call (Model.of takes existing modules)"
        raise invalid(f"block {spec.name}", expected, "one that returns the same module again", ModelError)


def _profile_block(spec: BlockSpec, streams: Streams, given: str, device: str) -> tuple[nn.Module, tuple[BlockProfile, Streams]]:
    """Build one block on a device, and return it, its profile and its output on the meta device.

    Args:
        streams: Its input, on the meta device.
        given: Description of the input and its source, for error messages.

    Raises:
        ModelError: As :func:`_build_on` and :func:`_checked_streams`, or if the block does not accept the input.
    """
    name, block, counter = spec.name, _build_on(device, spec), FlopCounterMode(display=False)
    counter.mod_tracker = _OneModule()  # type: ignore[assignment]  # torch's own sets hooks, which fail if forward calls autograd.grad
    inputs = [torch.zeros_like(t, device=device) for t in streams]
    try:
        with torch.no_grad(), frozen_statistics(normalisations(block)), counter, _SameTypes():  # type: ignore[no-untyped-call]
            output = block(*inputs)
    except (RuntimeError, ValueError, TypeError, ModelError) as error:
        raise invalid(f"block {name}", "an input that it accepts", f"{given} ({first_line(error)})", ModelError) from error
    outputs, reversible = _checked_streams(name, output), isinstance(block, ReversibleBlock)
    profile = BlockProfile(
        name=name,
        outputs=tuple(TensorSpec(tuple(t.shape), t.dtype) for t in outputs),
        parameters=sum(p.numel() for p in block.parameters()),
        trained=sum(p.numel() for p in block.parameters() if p.requires_grad),
        flops=counter.get_total_flops(),
        reversible=reversible,
        exact=reversible and type(block).enable_exact_streams is not ReversibleBlock.enable_exact_streams,  # type: ignore[attr-defined]
    )
    return block.to("meta"), (profile, tuple(t.to("meta") for t in outputs))


class Chain(nn.Sequential):
    """Blocks applied one after another with ordinary autograd. Keys of its state dictionary are ``<block name>.<key>``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last block for the input ``x`` of the first."""
        streams: Streams = (x,)
        for block in self.children():
            streams = as_streams(block(*streams))
        (out,) = without_side(streams)
        return out


class _OneModule(nullcontext[None]):
    """Where a FlopCounterMode counts all operations."""

    parents = ("Global",)


class _SameTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise the errors about types that kernels raise, but operations on the meta device don't."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _OF_ONE_TYPE and len(found := {t.dtype for t in args if isinstance(t, Tensor)}) > 1:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
            raise TypeError(f"{func.overloadpacket.__name__} of {names}")
        return func(*args, **(kwargs or {}))


_OF_ONE_TYPE = {torch.ops.aten.convolution, torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


def _check_distinct(name: str, modules: Mapping[str, nn.Module]) -> None:
    """Check that the blocks of a model share no parameter and no buffer.

    Raises:
        ModelError: If they do. The message names the tensor and both blocks.
    """
    owners: dict[int, tuple[str, str]] = {}
    for key, module in modules.items():
        own = {id(t): (key, tensor) for tensor, t in chain(module.named_parameters(), module.named_buffers())}
        for tensor in own.keys() & owners.keys():
            other, found = owners[tensor][0], own[tensor][1]
            expected = "tensors of its own (one block for tied layers, or head.weight = copy.deepcopy(embedding.weight))"
            raise invalid(f"block {key} of model {name}", expected, f"{found}, which belongs to block {other} too", ModelError)
        owners |= own


def _checked_streams(name: str, output: Any) -> Streams:
    """Return a block's output as streams.

    Raises:
        ModelError: If it is anything but floating-point tensors, and then any side tensors.
    """
    expected = "a tensor or a tuple of tensors as output"
    several = isinstance(output, tuple | list) and len(output) > 0 and all(isinstance(t, Tensor) for t in output)
    require(several or isinstance(output, Tensor), f"block {name}", expected, type(output).__name__, ModelError)
    streams = as_streams(output)
    for i, t in enumerate(streams):
        got, follows = str(TensorSpec(tuple(t.shape), t.dtype)), i > 0 and not t.dtype.is_complex
        expected = "floating-point tensors as output, which have gradients, and then any of integers"
        fits = t.is_floating_point() and not is_side(streams[i - 1]) if i else t.is_floating_point()
        require(fits or (follows and is_side(t)), f"block {name}", expected, got, ModelError)
    return streams
