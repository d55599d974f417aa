"""Turn batch normalisation followed by an activation, in an existing network, into InPlace-ABN, and back."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional as F

from petra.errors import ModelError, require
from petra.inplace_abn.layer import InPlaceABN
from petra.inplace_abn.normalise import away_from_zero
from petra.models.layers import LEAK
from petra.reversible.replay import INSTANCE_NORMS
from petra.torch_private import NormBase, module_hooks, version_counter

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU)
SPARE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
"""Layers whose backward pass does not need their output, which may therefore be overwritten."""


class Pair(NamedTuple):
    """Names of a normalisation and of the activation after it, and whether the input of the normalisation is overwritten."""

    norm: str
    activation: str
    overwrite: bool


@dataclass
class Conversion:
    """What :func:`to_inplace_abn` has converted.

    Attributes:
        taken: The converted pairs.
        left: For each other batch normalisation, why it was left as it is.
        rectified: Number of converted pairs with a ReLU.
    """

    taken: list[Pair] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    rectified: int = 0

    def __str__(self) -> str:
        lines = [f"InPlace-ABN: {len(self.taken)} of {len(self.taken) + len(self.left)} batch normalisations"]
        lines += [f"  {norm} + {act}{'' if over else ' (input kept)'}" for norm, act, over in self.taken]
        lines += [f"  not {name}: {reason}" for name, reason in self.left.items()]
        if self.rectified:
            lines.append(f"ReLU has no inverse: {self.rectified} of them are LeakyReLU({LEAK}) now")
        return "\n".join(lines)


class Activated(nn.Module):
    """The place of an activation that :class:`InPlaceABN` applies. Applies it itself if the input comes from another layer.

    Args:
        activation: The activation.
        slope: Slope of the one in its place.
        shared: Whether the network calls it elsewhere too.
    """

    def __init__(self, activation: nn.Module, slope: float, *, shared: bool) -> None:
        super().__init__()
        self.activation, self.slope, self.shared = activation, slope, shared

    def forward(self, x: Tensor) -> Tensor:
        tensors = [x] if x._base is None else [x, x._base]  # a hook may return a view
        if not self.shared or version_counter(x) in [getattr(t, "activated", None) for t in tensors]:
            return x
        y: Tensor = self.activation(x)
        return y


def mark(module: nn.Module, x: object, z: Tensor) -> None:
    """Mark the output of a layer as activated, until an operation writes to it. A forward hook."""
    z.activated = version_counter(z)  # type: ignore[attr-defined]


def activate(slope: float, module: nn.Module, x: object, y: Tensor) -> Tensor:
    """Apply the activation to the output of a batch normalisation. A forward hook."""
    mark(module, x, z := F.leaky_relu(y, slope))
    return z


class Call(NamedTuple):
    """A call of a module in the graph of ``root``, which contains it."""

    root: nn.Module
    node: fx.Node

    @property
    def module(self) -> nn.Module:
        """The called module."""
        return self.root.get_submodule(str(self.node.target))

    def reader(self) -> nn.Module | str:
        """Return the activation that alone reads the output, or why there is none."""
        readers = [*self.node.users]
        if len(readers) != 1:
            return f"{len(readers)} operations read its output"
        (reader,) = readers
        if reader.op == "call_module":
            module = Call(self.root, reader).module
            if type(module) not in ACTIVATIONS:
                return f"{type(module).__name__} follows"
            return "its activation has hooks" if module_hooks(module) else "its slope is 0" if not _slope(module) else module
        name = getattr(reader.target, "__name__", str(reader.target))
        return f"{name} follows" + (" as a function, not as a module" if "relu" in name else "")

    def may_overwrite(self) -> bool:
        """Return whether nothing else needs the input."""
        source = self.node.args[0]
        if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) > 1:
            return False
        return isinstance(Call(self.root, source).module, SPARE)


class Tracer(fx.Tracer):
    """Traces a network down to the modules of torch and of this package."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one node of the graph."""
        return isinstance(m, InPlaceABN | Activated) or super().is_leaf_module(m, module_qualified_name)


def to_inplace_abn(
    network: nn.Module,
    pairs: Iterable[tuple[str, str]] = (),
    *,
    group: dist.ProcessGroup | None = None,
    report: Callable[[str], object] = print,
) -> Conversion:
    """Replace each batch normalisation that only an activation reads by InPlace-ABN, in place.

    ``torch.fx`` traces the network, or those of its modules that can be traced, and finds the pairs. State dictionaries keep their
    keys, and optimizers their parameters. ReLU has no inverse: it becomes LeakyReLU(0.01), and the result equals the network with
    that activation. A layer overwrites its input if nothing else reads it, and if it comes from a convolution or a linear layer.

    Args:
        network: The network. Convert it before ``DistributedDataParallel`` wraps it.
        pairs: Names of further normalisations and of the activations directly after them, where the network can't be traced.
        group: Process group that shares batch statistics. None: those of ``nn.SyncBatchNorm`` keep theirs, the others have none.
        report: Called with a text that names what was converted and what was not.

    Raises:
        ModelError: If one of ``pairs`` can't be converted. The network is then unchanged.
    """
    found, names = Conversion(), {module: name for name, module in network.named_modules()}
    occurrences = Counter([module for _, module in network.named_modules(remove_duplicate=False)])
    calls = _calls(network)
    chosen, found.left = _chosen(names, calls)
    chosen |= _named(network, pairs)
    places = dict[nn.Module, Activated]()
    for norm, (act, overwrite) in chosen.items():
        if act not in places:
            uses = len(calls[act])
            shared = occurrences[act] > 1 or not uses or uses > len(calls[norm])
            places[act] = Activated(act, _slope(act), shared=shared)
            found.rectified += isinstance(act, nn.ReLU)
        _replace(network, norm, _inplace(norm, places[act], overwrite, group))
        found.taken.append(Pair(names[norm], names[act], overwrite))
        found.left.pop(names[norm], None)
    for act, place in places.items():
        _replace(network, act, place)
    report(str(found))
    return found


def to_batch_norm(network: nn.Module) -> None:
    """Replace InPlace-ABN by batch normalisation and leaky ReLU, in place: the inverse of :func:`to_inplace_abn`.

    γ closer to 0 than ``eps`` become ±``eps``, as the layer has used them. State dictionaries keep their keys.
    """
    shared = any(isinstance(module, Activated) and module.shared for module in network.modules())
    for layer in [module for module in network.modules() if isinstance(module, InPlaceABN)]:
        kind = getattr(layer, "replaced", nn.BatchNorm2d)
        norm: Any = kind(layer.num_features, layer.eps, layer.momentum, device="meta")
        _move_state(layer, norm)
        norm.weight.data = away_from_zero(norm.weight.data, layer.eps)
        if layer.slope != 1 and (shared or not hasattr(layer, "replaced")):
            norm.register_forward_hook(partial(activate, layer.slope))
        _replace(network, layer, norm)
    for place in [module for module in network.modules() if isinstance(module, Activated) and not module.shared]:
        _replace(network, place, nn.LeakyReLU(place.slope) if not shared else nn.Identity())


def authors_state(state: Mapping[str, Tensor], eps: float = 1e-5) -> dict[str, Tensor]:
    """Return a state dictionary of the authors' package ``inplace-abn`` for networks with this layer.

    Their layer scales by |γ| + ``eps`` and does not count batches. Keys lose the prefix ``module.`` of parallel wrappers.
    """
    state = {key.removeprefix("module."): value for key, value in state.items()}
    for name in [key.removesuffix("running_mean") for key in state if key.endswith("running_mean")]:
        state[f"{name}weight"] = state[f"{name}weight"].abs() + eps
        state.setdefault(f"{name}num_batches_tracked", state[f"{name}weight"].new_zeros((), dtype=int))  # type: ignore[call-overload]
    return state


def _calls(network: nn.Module) -> defaultdict[nn.Module, list[Call]]:
    """Return the calls of each module in training and in evaluation mode."""
    modes, found = {module: module.training for module in network.modules()}, defaultdict[nn.Module, list[Call]](list)
    try:
        for training in (True, False):
            for root, graph in _graphs(network.train(training)):
                for call in [Call(root, node) for node in graph.nodes if node.op == "call_module"]:
                    found[call.module].append(call)
    finally:
        for module, training in modes.items():
            module.training = training
    return found


def _graphs(module: nn.Module) -> Iterator[tuple[nn.Module, fx.Graph]]:
    """Yield the graph of a module, or those of the modules inside it if it can't be traced."""
    try:
        graph = Tracer().trace(module)
    except Exception:  # whatever a forward may raise for symbolic arguments
        for child in module.children():
            yield from _graphs(child)
    else:
        yield module, graph


def _chosen(
    names: Mapping[nn.Module, str], calls: Mapping[nn.Module, Sequence[Call]]
) -> tuple[dict[nn.Module, tuple[nn.Module, bool]], dict[str, str]]:
    """Return the activation after each fit normalisation and whether it may overwrite its input, and reasons for the others."""
    chosen, left = dict[nn.Module, tuple[nn.Module, bool]](), dict[str, str]()
    for norm, name in names.items():
        if not isinstance(norm, NormBase) or isinstance(norm, (InPlaceABN, *INSTANCE_NORMS)):
            continue
        own = calls[norm]
        readers = [call.reader() for call in own]
        reasons = [_unfit(norm), *(reader for reader in readers if isinstance(reader, str))]
        reasons += ["it is in a module that can't be traced (name it in pairs)"] if not own else []
        reasons += ["several activations follow"] if len({id(reader) for reader in readers}) > 1 else []
        reason = next(filter(None, reasons), "")
        if reason:
            left[name] = reason
        else:
            chosen[norm] = readers[0], all(call.may_overwrite() for call in own)  # type: ignore[assignment]
    return chosen, left


def _named(network: nn.Module, pairs: Iterable[tuple[str, str]]) -> dict[nn.Module, tuple[nn.Module, bool]]:
    """Return the modules of ``pairs``, which keep the input of the normalisation."""
    modules, found = dict(network.named_modules()), dict[nn.Module, tuple[nn.Module, bool]]()
    for name, activation in pairs:
        norm, act = modules.get(name), modules.get(activation)
        reason = "nothing of that name" if norm is None else _unfit(norm)
        require(not reason, f"pairs: {name}", "a batch normalisation that can be inverted", reason, ModelError)
        fits = type(act) in ACTIVATIONS and _slope(act) > 0 and not module_hooks(act)  # type: ignore[arg-type]
        require(fits, f"pairs: {activation}", "ReLU or LeakyReLU without hooks", act, ModelError)
        assert norm is not None
        assert act is not None
        found[norm] = act, False
    return found


def _unfit(norm: nn.Module) -> str:
    """Return why a module can't become InPlace-ABN; empty if it can."""
    if type(norm) not in NORMS:
        return f"its class is {type(norm).__name__}"
    assert isinstance(norm, NormBase)
    if norm.weight is None or not norm.track_running_stats or norm.momentum is None:
        return "it lacks weights, running statistics or a momentum"
    if module_hooks(norm):
        return "it has hooks"
    small = 0 if norm.weight.is_meta else int((norm.weight.abs() < norm.eps).sum())
    return f"|γ| < eps in {small} of {norm.num_features} channels" if small else ""


def _slope(act: nn.Module) -> float:
    """Return the slope of the activation in the place of another one; 0 if there is none."""
    slope = act.negative_slope if isinstance(act, nn.LeakyReLU) else LEAK
    return slope if 0 < slope <= 1 else 0.0


def _inplace(norm: nn.Module, place: Activated, overwrite: bool, group: dist.ProcessGroup | None) -> InPlaceABN:
    """Return the layer with the parameters and buffers of a normalisation."""
    assert isinstance(norm, NormBase)
    if isinstance(norm, nn.SyncBatchNorm) and group is None and dist.is_initialized():
        group = norm.process_group or dist.group.WORLD
    momentum = norm.momentum
    assert momentum is not None
    layer = InPlaceABN(norm.num_features, place.slope, overwrite=overwrite, group=group, eps=norm.eps, momentum=momentum)
    _move_state(norm, layer)
    layer.replaced = type(norm)  # type: ignore[assignment]
    if place.shared:
        layer.register_forward_hook(mark)
    return layer


def _move_state(source: nn.Module, target: nn.Module) -> None:
    """Give a layer the parameters, buffers and mode of another one."""
    for name, parameter in source.named_parameters():
        setattr(target, name, parameter)
    for name, buffer in source.named_buffers():
        setattr(target, name, buffer)
    target.training = source.training


def _replace(network: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in each place of another one."""
    for parent in [*network.modules()]:
        for name, child in [*parent._modules.items()]:  # named_children() omits what occurs twice
            if child is old and parent is not new:
                setattr(parent, name, new)
