"""Memory that a GPU's allocator will reach, per process and per stage: what each block allocates, added up along the timetable.

:mod:`petra.cost_model.block_memory` counts what the passes of one block store, and what they allocate for a moment. The timetable
tells which microbatches and messages exist at the same time, and which step a process runs then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from petra.cost_model.block_memory import CPU, BlockMemory, Known, LiveBytes, count_block, empty
from petra.diagnostics.activation_memory import rounded
from petra.engine.endpoints import LossPort
from petra.engine.recipe import Recipe
from petra.method import Keep, Weights
from petra.plan import Plan
from petra.plan.timetable import PeriodicRounds, Round, Timetable
from petra.specs import TensorSpec
from petra.torch_private import fake_tensor_mode

Numbers = NDArray[np.int64]
UNLIMITED = 2**40
"""More microbatches than any timetable runs until it repeats."""
WORKSPACE = 32 * 2**20
"""Allowance for workspaces of cuBLAS, in bytes: the default on Hopper GPUs. Those of cuDNN depend on its choice of algorithms."""


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes of one process at the peak of training, or the part of one of its stages.

    Attributes:
        weights: Parameters and buffers.
        gradients: Accumulated gradients.
        optimizer: States of the optimizer, and moving averages.
        stored: What else exists when a forward ends, at the time when the process has most of it: stored activations, stashed
            weights, and messages that have arrived or are being sent.
        temporary: What the step that needs most adds for a moment: the graph of a backward, and its gradients.
        workspace: Allowance for workspaces of libraries; 0 for a stage.
        stages: The stages of the process by index; empty for a stage. A message counts for the stage that receives it.
    """

    weights: int
    gradients: int
    optimizer: int
    stored: int
    temporary: int
    workspace: int = WORKSPACE
    stages: Mapping[int, PredictedMemory] = field(default_factory=dict)

    @property
    def tensors(self) -> int:
        """Peak of torch's allocator without workspaces."""
        return self.weights + self.gradients + self.optimizer + self.stored + self.temporary

    @property
    def total(self) -> int:
        """Peak with workspaces. The CUDA context and NCCL's buffers, which are not torch's, come on top."""
        return self.tensors + self.workspace


class _Stage(NamedTuple):
    """Bytes of one stage.

    Attributes:
        fixed: Weights, gradients, and states of the optimizer.
        casts: Copies of weights that graphs refer to.
        stored: Activations of one microbatch in flight.
        version, graph_version: An old version of all weights, and of those of blocks that store their graph.
        down, up: Messages to and from the stage after it.
        ends: What exists besides when a forward ends: its input and output.
        forward, backward, update: Most that a step adds for a moment.
    """

    fixed: tuple[int, int, int]
    casts: int
    stored: int
    version: int
    graph_version: int
    down: int
    up: int
    ends: int
    forward: int
    backward: int
    update: int


def predict_memory(plan: Plan, recipe: Recipe, targets: TensorSpec, known: Known | None = None) -> list[PredictedMemory]:
    """Predict the memory of each process of a pipeline, and of its stages. Needs neither a GPU nor the memory that it predicts.

    Args:
        plan: Plan of the run. Between processes, the lockstep transport is assumed.
        recipe: Training settings. Their functions are called with tensors without data.
        targets: Shape and type of a microbatch's targets (of a replica's share).
        known: As for :func:`petra.cost_model.block_memory.count_block`.

    Raises:
        PetraError: If this torch has no FakeTensorMode.
    """
    known = {} if known is None else known
    stages = [_stage(plan, j, recipe, targets, known) for j in range(len(plan.stages))]
    processes = [owned for owned in plan.layout.processes if owned]
    begins = np.array([owned.start for owned in processes])
    owner = np.repeat(np.arange(len(processes)), [len(owned) for owned in processes])
    ends, forward, backward, update = (_column(stages, name) for name in ("ends", "forward", "backward", "update"))
    peaks, most, at_most = np.zeros(len(stages), np.int64), np.zeros(len(processes), np.int64), np.zeros(len(stages), np.int64)
    for round_, state in _states(plan, stages, owner):
        f, b = round_.stages[round_.forward], round_.stages[~round_.forward]
        whole = np.add.reduceat(state, begins)[owner]
        np.maximum.at(peaks, f, (whole + forward)[f])
        np.maximum.at(peaks, b, (whole + np.maximum(backward, update))[b])
        for j in f.tolist():
            if (now := int(whole[j] + ends[j])) > most[owner[j]]:
                most[owner[j]], own = now, slice(processes[owner[j]].start, processes[owner[j]].stop)
                at_most[own] = state[own]
                at_most[j] += ends[j]
    found = []
    for p, owned in enumerate(processes):
        temporary = {j: max(0, int(peaks[j] - most[p])) for j in owned}
        parts = {j: PredictedMemory(*stages[j].fixed, int(at_most[j]), temporary[j], workspace=0) for j in owned}
        weights, gradients, optimizer = (sum(sizes) for sizes in zip(*(stages[j].fixed for j in owned), strict=True))
        found.append(PredictedMemory(weights, gradients, optimizer, int(most[p]), max(temporary.values()), stages=parts))
    return found + [PredictedMemory(0, 0, 0, 0, 0)] * (len(plan.layout.processes) - len(processes))


def stored_activations(plan: Plan) -> list[int]:
    """Return the bytes of activations that each stage stores between forward and backward, for all microbatches in flight."""
    known: Known = {}
    return [stage.in_flight * sum(_stored(plan, j, None, known)) for j, stage in enumerate(plan.stages)]


def _states(plan: Plan, stages: Sequence[_Stage], owner: Numbers) -> Iterator[tuple[Round, Numbers]]:
    """Yield each round with the bytes of each stage that exist while it runs, besides its temporary and its fixed memory."""
    casts, stored, version, graph = (_column(stages, name) for name in ("casts", "stored", "version", "graph_version"))
    down, up = (_column(stages, name)[:-1] for name in ("down", "up"))
    k, flush = plan.k, plan.flush_every
    double = np.array([stage.weights is Weights.DOUBLE for stage in plan.stages])
    delays = np.array(plan.delays) * (flush is None)  # otherwise no update separates forward and backward
    remote = owner[1:] != owner[:-1]
    rounds = PeriodicRounds(Timetable(plan.delays, plan.boundary_delays, 0, UNLIMITED, flush), flush or 1, lambda round_: round_)
    forwards, backwards = np.zeros(len(stages), np.int64), np.zeros(len(stages), np.int64)  # microbatches done
    sending, buffers = np.zeros((2, len(remote)), np.int64), np.zeros((2, len(remote)), np.int64)  # down and up
    for round_ in _until_repeated(rounds, k if flush is None else 1):
        f, b = (np.zeros(len(stages), np.int64) for _ in range(2))
        f[round_.stages[round_.forward]] = b[round_.stages[~round_.forward]] = 1
        done, finished = forwards + f, backwards + b
        oldest = np.where(double, backwards // k - 1, (backwards - delays) // k)
        state = casts + (done - backwards) * stored + (backwards // k - oldest) * version + (done > backwards) * graph
        # A message from another process arrives after the round.
        state[1:] += np.maximum(done[:-1] - remote * f[:-1] - done[1:], 0) * down + buffers[1] * up
        state[:-1] += np.maximum(finished[1:] - remote * b[1:] - finished[:-1], 0) * up + buffers[0] * down
        yield round_, state
        forwards, backwards = done, finished
        # What is sent is copied into buffers, which are free again after the next exchange of the process.
        sent = np.stack([f[:-1], b[1:]]) * remote
        buffers = np.maximum(buffers, sent + sending)
        exchanges = np.zeros(len(stages), bool)
        exchanges[:-1] |= sent.any(0)
        exchanges[1:] |= sent.any(0)
        exchanges = np.bincount(owner, exchanges)[owner] > 0
        sending = np.where(np.stack([exchanges[:-1], exchanges[1:]]), sent, sending)


def _until_repeated(rounds: PeriodicRounds[Round], times: int) -> Iterator[Round]:
    """Yield rounds until the state repeats, and those of some repetitions: as many as one update takes."""
    yield from rounds.until_steady()
    for _ in range(times):
        yield from rounds.body


def _column(stages: Sequence[_Stage], name: str) -> Numbers:
    return np.array([getattr(stage, name) for stage in stages], np.int64)


def _count_blocks(plan: Plan, j: int, recipe: Recipe | None, known: Known) -> list[BlockMemory]:
    """Count the memory of the blocks of a stage."""
    stage, optimizer = plan.stages[j], None if recipe is None else recipe.optimizer
    return [
        count_block(plan.model, b, inputs, keep, stage.weights, plan.numerics, optimizer, known)
        for b, inputs, keep in zip(stage.blocks, _inputs(plan, j), stage.keeps, strict=True)
    ]


def _inputs(plan: Plan, j: int) -> list[Sequence[TensorSpec]]:
    """Return the form of the input of each block of a stage."""
    return [plan.stages[j].inputs, *(profile.outputs for profile in plan.stages[j].profiles[:-1])]


def _stage(plan: Plan, j: int, recipe: Recipe, targets: TensorSpec, known: Known) -> _Stage:
    """Add up the blocks of a stage."""
    stage, last = plan.stages[j], j == len(plan.stages) - 1
    blocks, average = _count_blocks(plan, j, recipe, known), recipe.rules.average is not None
    stored = _stored(plan, j, recipe, known, alone=not _has_stage_before(plan, j))
    down, up = (0, 0) if last else (plan.boundaries[j].forward_bytes, plan.boundaries[j].backward_bytes)
    loss, delta = _loss(stage.outputs, recipe, targets, known) if last else (0, 0)
    forward, ends, output = _forward(blocks, stored, plan, j)
    backward = _backward(blocks, stored, plan, j, output + delta if last else _bytes(stage.outputs))
    fixed = [(block.weights, block.gradients, block.optimizer + average * block.gradients) for block in blocks]
    weights, gradients, optimizer = (sum(sizes) for sizes in zip(*fixed, strict=True))
    copied = stage.weights is not Weights.CURRENT
    return _Stage(
        fixed=(weights, gradients, optimizer),
        casts=sum(block.casts for block in blocks),
        stored=sum(stored),
        version=copied * gradients,
        graph_version=copied * sum(b.gradients for b, keep in zip(blocks, stage.keeps, strict=True) if keep is Keep.GRAPH),
        down=down,
        up=up,
        ends=ends,
        forward=max(forward, ends + loss),
        backward=backward,
        update=sum(block.update for block in blocks),
    )


def _forward(blocks: Sequence[BlockMemory], stored: Sequence[int], plan: Plan, j: int) -> tuple[int, int, int]:
    """Return the most that a forward adds to what it stores, what exists when it ends, and how much of that is its output.

    The stage's input lives until the end of the stage, a block's input until the end of the block.
    """
    stage, received = plan.stages[j], j > 0 and not _has_stage_before(plan, j)
    # The parts of a message from another process share its memory, so a block that stores one of several copies it.
    shares = stage.keeps[0] is Keep.GRAPH or (stage.keeps[0] is Keep.INPUT and not (received and len(stage.inputs) > 1))
    x, kept, held, most = _bytes(stage.inputs), 0, 0, 0
    if shares:
        kept = -x
    for i, (block, more) in enumerate(zip(blocks, stored, strict=True)):
        most = max(most, kept + held + block.forward)
        kept += more
        held = block.made if i == 0 or stage.keeps[i] is Keep.GRAPH else block.output
    return x + most - sum(stored), x + kept + held - sum(stored), held


def _backward(blocks: Sequence[BlockMemory], stored: Sequence[int], plan: Plan, j: int, received: int) -> int:
    """Return the most that a backward adds for a moment.

    The output and its gradient live until the end of the stage.

    Args:
        received: Bytes of the output's gradient; at the last stage, of the output too.
    """
    stage = plan.stages[j]
    if stage.keeps[-1] is Keep.NOTHING and j < len(plan.stages) - 1:
        received *= 2
    most = freed = between = 0
    for block, more, inputs in zip(reversed(blocks), reversed(stored), reversed(_inputs(plan, j)), strict=True):
        most = max(most, received + between + block.backward - freed)
        between = 2 * _bytes(inputs) if between else block.returned
        freed += more
    if j and stage.delay and not plan.method.flush and plan.boundary_delays[j] % 2 == 0:
        # In the drain at the end, backwards follow one another: two messages are being sent, and none waits for a forward.
        before = plan.boundaries[j - 1]
        most += max(0, before.backward_bytes - before.forward_bytes - 2 * sum(stored))
    return most


def _stored(plan: Plan, j: int, recipe: Recipe | None, known: Known, *, alone: bool = True) -> list[int]:
    """Return what each block stores besides what the block before it stores. An input is the output of the block before.

    Args:
        alone: Leave out the stage before.
    """
    keeps, blocks = plan.stages[j].keeps, _count_blocks(plan, j, recipe, known)
    before = None if alone else (_count_blocks(plan, j - 1, recipe, known)[-1], plan.stages[j - 1].keeps[-1])
    sizes = []
    for block, keep, inputs in zip(blocks, keeps, _inputs(plan, j), strict=True):
        shared = 0
        if before is not None and keep in (Keep.GRAPH, Keep.INPUT):
            earlier, kept = before
            shared = _bytes(inputs) - (earlier.made if kept in (Keep.GRAPH, Keep.INPUT) else earlier.output)
        sizes.append(block.stored - shared)
        before = block, keep
    return sizes


def _has_stage_before(plan: Plan, j: int) -> bool:
    """Return whether the stage before stage ``j`` is in the same process."""
    return any(owned.start < j < owned.stop for owned in plan.layout.processes)


def _bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(rounded(spec.bytes) for spec in specs)


def _loss(outputs: Sequence[TensorSpec], recipe: Recipe, targets: TensorSpec, known: Known) -> tuple[int, int]:
    """Return the most that the loss adds for a moment to the output, and what it leaves for the backward."""
    key = ("loss", tuple(outputs), targets)
    if key not in known:
        with fake_tensor_mode(), LiveBytes() as live:
            port, y = LossPort(CPU, recipe.losses, recipe.metrics), empty(outputs)
            port.start(_Blank(targets), 0, 0)
            before = live.most = live.now
            port.send(0, (y,))
            known[key] = live.most - before, live.now - before
    return known[key]  # type: ignore[no-any-return]


class _Blank:
    """Targets without data."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec

    def inputs(self, m: int) -> Tensor:
        raise NotImplementedError

    def targets(self, m: int) -> Tensor:
        return empty([self._spec])[0]
