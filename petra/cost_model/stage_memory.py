"""Memory of one stage: what its passes and its update allocate, counted by running them on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from petra.diagnostics.process_memory import rounded
from petra.engine.build import make_stage
from petra.engine.endpoints import LossPort
from petra.engine.options.bf16_weights import MasterWeights, shorten
from petra.engine.options.frozen import ForwardStage
from petra.engine.options.outer_step import OuterUpdate
from petra.engine.options.sharding import divide, elements, keep_share
from petra.engine.options.sums import AllReduces
from petra.engine.recipe import Recipe
from petra.engine.stage import Stage
from petra.engine.worker import Worker
from petra.errors import invalid
from petra.method import Keep, Weights
from petra.model import BlockSpec, Model
from petra.plan import Plan
from petra.plan.messages import boundary
from petra.plan.plan import StagePlan
from petra.reversible import seeded
from petra.settings import Numerics
from petra.specs import Message, MessageSpec, TensorSpec
from petra.torch_private import DEVICE, TorchDispatchMode, eager, fake_tensor_mode, inner_tensors, storage_key, tree_leaves
from petra.transport.packing import Packing

Receive = Callable[[int], Message]
"""Returns the message of a microbatch."""
Known = dict[Hashable, Any]
"""What has been counted, by what it depends on. Plans with the same model, inputs, number formats and recipe may share it."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage.

    Attributes:
        weights: Parameters and buffers.
        once: Parts of ``weights`` that a process has once, however many of its stages use them, by key.
        gradients: Gradients of the trained parameters.
        version: One version of the trained parameters.
        graph_version: Its part in blocks that store their graph.
        optimizer: States of the optimizer, and the moving average.
        casts: Copies of weights that live until the update: those that graphs of stashed weights refer to.
        stored: What a forward leaves for its backward, without what the stage before stores too.
        ends: What exists besides when a forward ends: its input and output.
        forward, backward, update: Most that a step adds for a moment, the messages that it receives included.
    """

    weights: int
    once: Mapping[Hashable, int]
    gradients: int
    version: int
    graph_version: int
    optimizer: int
    casts: int
    stored: int
    ends: int
    forward: int
    backward: int
    update: int


def count_stage(
    model: Model,
    stage: StagePlan,
    numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
    *,
    recipe: Recipe | None = None,
    run: Plan | None = None,
    targets: TensorSpec | None = None,
    before: StagePlan | None = None,
    returns_input: bool = False,
    remote: tuple[bool, bool] = (False, False),
    known: Known | None = None,
) -> StageMemory:
    """Count the memory of a stage. Equal stages are counted once. Needs neither a GPU nor the memory that it counts.

    Args:
        recipe, run: Training settings, and the plan that extensions read and that tells which stages only run forward; None if
            neither the optimizer nor the loss counts, and if all stages run backward.
        targets: Shape and type of a microbatch's targets if the stage is the last one.
        before: The stage before it if that is in the same process.
        returns_input: As for :class:`petra.engine.stage.Stage`.
        remote: Whether the stages before and after it are in other processes.
        known: Stages that have been counted, to which this call adds its own.

    Raises:
        PetraError: If this torch has no FakeTensorMode, or the optimizer reads values, such as basis rotation.
    """
    known, parts = {} if known is None else known, [stage] if before is None else [before, stage]
    trained = [run is None or all(each.backward_bytes for each in run.boundaries[part.index : part.index + 1]) for part in parts]
    kinds = [tuple(model.blocks[b].kind for b in part.blocks) for part in parts]
    forms = [(p.blocks.start == 0, p.inputs, p.keeps, p.weights, p.staleness > 0, t) for p, t in zip(parts, trained, strict=True)]
    key = (*zip(kinds, forms, strict=True), returns_input, remote, targets, recipe and bool(recipe.extensions) * stage.staleness)
    if key not in known:
        modules = [[_on_meta(model.blocks[b]).train() for b in part.blocks] for part in parts]
        with fake_tensor_mode(), LiveBytes() as live:
            first = _receiver(boundary(parts[0].inputs, Keep.INPUT, numerics, 0).forward, remote[0])
            stages, once = [], dict[Hashable, Tensor]()
            for part, blocks, has_backward in zip(parts, modules, trained, strict=True):
                for module in blocks:
                    _fake_module(module, numerics.channels_last, once)
                made = make_stage(
                    blocks,
                    part.keeps,
                    first_block=min(part.blocks.start, 1),
                    weights=part.weights,
                    numerics=numerics,
                    overwritten=part.staleness > 0 and part.weights is Weights.CURRENT,
                    returns_input=returns_input,
                    outputs=part.outputs,
                    fetch=lambda m: first(m)[0],
                )
                stages.append(made if has_backward else _only_forward(made))
            receive = first if before is None else lambda m: (stages[0].forward(m, *first(m)),)
            answer = _receiver(boundary(stage.outputs, stage.keeps[-1], numerics, 0, trained[-1]).backward, remote[1])
            after: Any = SimpleNamespace(send=lambda m, message: None, receive=answer)
            if recipe is not None and targets is not None:
                after = LossPort(CPU, recipe.losses, recipe.metrics)
                after.start(SimpleNamespace(targets=lambda m: _empty(targets)), 0, 0)
            known[key] = _count(stages[-1], stage, receive, after, recipe, run, live)
    return known[key]  # type: ignore[no-any-return]


def _only_forward(stage: Stage) -> Stage:
    return ForwardStage(stage.runners, stage.gradients, channels_last=stage.channels_last)


def _count(
    stage: Stage, plan: StagePlan, receive: Receive, after: Any, recipe: Recipe | None, run: Plan | None, live: LiveBytes
) -> StageMemory:
    """Count passes that come after others: the first ones make copies of the weights."""
    if recipe is not None and recipe.rules.weights == "bf16":
        shorten(stage)
    before: Any = SimpleNamespace(receive=receive, send=lambda m, message: None)
    worker = Worker(0, stage, before, after, lambda t: None)  # type: ignore[arg-type]
    receive(0)
    begin = live.now
    receive(1)
    shared = live.now - begin  # what the stage before stores of each microbatch
    begin = live.now + shared
    worker.forward(2)
    worker.backward(2)
    casts = live.now - begin
    begin = live.now + shared
    (x,) = receive(3)
    y = stage.forward(3, x)
    ends = live.now - begin
    after.send(3, (y,))
    del x, y
    stored = live.now - begin
    begin = live.most = live.now + shared + stored
    worker.forward(4)
    forward = live.most - begin
    if plan.weights is not Weights.CURRENT:
        with stage.updating():
            pass
        begin = live.now
    live.most = live.now
    worker.backward(4)
    backward = live.most - begin
    versions = [sum(rounded(p.nbytes) for p in runner.parameters.values()) for runner in stage.runners]
    graphs = sum(size for size, keep in zip(versions, plan.keeps, strict=True) if keep is Keep.GRAPH)
    gradients = sum(rounded(g.nbytes) for p in stage.gradients.parameters if (g := p.grad) is not None)
    states = update = 0
    if recipe is not None and stage.gradients.parameters:
        states, update = _count_update(stage, plan, recipe, run, live)
        states += sum(versions) * (recipe.rules.average is not None)
    weights = sum(rounded(t.nbytes) for t in (*stage.module.parameters(), *stage.module.buffers()))
    once: dict[Hashable, int] = {
        (key, name): rounded(t.nbytes)
        for part in stage.module.modules()
        if (key := getattr(part, "once_per_process", None)) is not None
        for name, t in part.named_buffers(recurse=False)
    }
    return StageMemory(
        weights, once, gradients, sum(versions), graphs, states, casts, stored, ends - stored, forward, backward, update
    )


def _count_update(stage: Stage, plan: StagePlan, recipe: Recipe, run: Plan | None, live: LiveBytes) -> tuple[int, int]:
    """Return the bytes of the optimizer's states and of what extensions store, and the most that a second step adds for a moment.

    If optimizer states are divided over replicas, they are those of the replica that has most.
    """
    begin, optimizer = live.now, recipe.optimizer(stage.module)
    if recipe.rules.weights == "bf16":
        MasterWeights(optimizer)
    if recipe.rules.shard and run is not None:
        shares = divide(stage.gradients.parameters, run.layout.dp)
        keep_share(optimizer, shares, max(range(len(shares)), key=lambda i: elements(shares[i])))
    kept = list[Sequence[object]]()
    if run is not None:
        for extension in recipe.extensions:
            extension.parts(stage, optimizer, run, plan.index)  # hooks of the optimizer refer to them
        kept += [extension.parts_after_step(stage, run, plan.index, ()) for extension in recipe.extensions]
    sums = [part for parts in kept for part in parts if isinstance(part, OuterUpdate)]
    try:
        with eager():
            optimizer.step()
            before = live.most = live.now
            optimizer.step()
            held, most = _count_sums(sums, 1 if run is None else run.layout.dp, live)
    except Exception as error:
        if type(error).__name__ != "DataDependentOutputException":
            raise
        expected = "an optimizer that reads no values of tensors, to predict memory"
        raise invalid("optim", expected, type(optimizer).__name__) from error
    return before - begin + held, max(live.most - before, most)


def _count_sums(updates: Sequence[OuterUpdate], replicas: int, live: LiveBytes) -> tuple[int, int]:
    """Return the bytes that sums over replicas hold while they travel beside training, and the most that they add for a moment."""
    step, before, live.most = live.most, live.now, live.now
    held = 0
    for outer in updates if replicas > 1 else ():
        outer.join(AllReduces(_Group(replicas), outer.packed), replicas)  # type: ignore[arg-type]
        outer.send()
        held += (live.now - before) * outer.overlaps
        outer.act()
    most, live.most = live.most - before - held, step
    return held, most


class _Group:
    """A process group whose sums and exchanges only take memory."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: object) -> _Group:
        return self

    def alltoall_base(self, *tensors: object) -> _Group:
        return self

    def wait(self) -> None:
        pass


def _receiver(spec: MessageSpec, remote: bool) -> Receive:
    """Return a function that makes messages. The parts of one from another process share its memory."""
    if remote:
        packing = Packing(spec, CPU, "")
        return lambda m: packing.unpack(packing.buffer())
    return lambda m: tuple(tuple(map(_empty, part)) for part in spec)


def _empty(spec: TensorSpec) -> Tensor:
    last = torch.channels_last if spec.channels_last else torch.contiguous_format
    return torch.empty(spec.shape, dtype=spec.dtype, memory_format=last)


def _on_meta(block: BlockSpec) -> nn.Module:
    """Build a block on the meta device, or on the CPU if its function reads values, as that of an orthogonal parametrization."""
    try:
        with torch.device("meta"):
            return block.build()
    except RuntimeError:
        with seeded(0):
            return block.build().to("meta")


def _fake_module(module: nn.Module, channels_last: bool, once: dict[Hashable, Tensor]) -> None:
    """Replace a module's tensors on the meta device by fake tensors on the CPU, where autocast applies.

    Args:
        once: Buffers that exist once per process (attribute ``once_per_process`` of their module), by key and name.
    """
    made: dict[int, Tensor] = {}
    for part in module.modules():
        parameters = [*part.named_parameters(recurse=False, remove_duplicate=False)]
        buffers = [*part.named_buffers(recurse=False, remove_duplicate=False)]
        key = getattr(part, "once_per_process", None)
        for name, tensor in (*parameters, *buffers):
            fake = _empty(TensorSpec(tuple(tensor.shape), tensor.dtype, channels_last and tensor.dim() == 4))
            fake = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
            own = made.setdefault(id(tensor), fake) if key is None else once.setdefault((key, name), fake)
            setattr(part, name, own)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations inside the ``with`` block create, while they live.

    Attributes:
        now: Bytes that live now.
        most: Most bytes that lived at a time since the caller last set it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is DEVICE:
            return CPU  # of all tensors here; FakeTensorMode would take longer, and each operation asks several times
        if function.name().startswith("aten::_fused_") and not function._schema.returns:
            return None  # updates in place; FakeTensorMode would run the optimizer's kernel on real tensors
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and not inner_tensors(tensor) and storage_key(tensor) not in self._seen:
                self._add(storage_key(tensor), tensor.untyped_storage())
        return found

    def _add(self, key: int, storage: Any) -> None:
        def freed(_: object) -> None:
            del self._seen[key]
            self.now -= size

        size = rounded(storage.nbytes())
        self._seen[key] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)
