"""Memory that a GPU's allocator will reach, per process and per stage: what each stage allocates, added up along the timetable.

:mod:`petra.cost_model.stage_memory` counts what the passes of one stage store, and what they allocate for a moment. The timetable
tells which microbatches and messages exist at the same time, and which step a process runs then.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from petra.cost_model.event_graph import UNLIMITED
from petra.cost_model.stage_memory import Known, StageMemory, count_stage
from petra.engine.recipe import Recipe
from petra.method import Weights
from petra.plan import Plan
from petra.plan.messages import returns_activations
from petra.plan.timetable import PeriodicRounds, Round, Timetable
from petra.specs import MessageSpec, PackedPart, TensorSpec
from petra.transport.edge import posted_receives

Numbers = NDArray[np.int64]
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


def predict_memory(
    plan: Plan, recipe: Recipe, targets: TensorSpec, known: Known | None = None, *, device_type: str = "cuda"
) -> list[PredictedMemory]:
    """Predict the memory of each process of a pipeline, and of its stages. Needs neither a GPU nor the memory that it predicts.

    Args:
        plan: Plan of the run. On GPUs, the lockstep transport is assumed between processes.
        recipe: Training settings. Their functions are called with tensors without data.
        targets: Shape and type of a microbatch's targets (of a replica's share).
        known: As for :func:`petra.cost_model.stage_memory.count_stage`.
        device_type: ``cpu`` or ``cuda``. On CPUs, the edge transport has buffers of messages that have not arrived.

    Raises:
        PetraError: If this torch has no FakeTensorMode.
    """
    processes = [owned for owned in plan.layout.processes if owned]
    begins = np.array([owned.start for owned in processes])
    owner = np.repeat(np.arange(len(processes)), [len(owned) for owned in processes])
    remote = owner[1:] != owner[:-1]
    stages = _count_stages(plan, recipe, targets, {} if known is None else known, remote)
    ends, forward, backward, update = (_column(stages, name) for name in ("ends", "forward", "backward", "update"))
    backward += _drain(plan, stages)
    double = [own.weights is Weights.DOUBLE for own in plan.stages]
    update = np.maximum(update, double * _column(stages, "version"))  # the new version exists before the last one is freed
    peaks, most, at_most = np.zeros(len(stages), np.int64), np.zeros(len(processes), np.int64), np.zeros(len(stages), np.int64)
    for round_, state in _states(plan, stages, owner, remote, posted=device_type == "cpu" and plan.transport == "edge"):
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
        parts, once = {}, dict[Hashable, int]()
        for j in owned:
            weights = stages[j].weights - sum(size for key, size in stages[j].once.items() if key in once)
            once.update(stages[j].once)
            sizes = weights, stages[j].gradients, stages[j].optimizer, int(at_most[j]), max(0, int(peaks[j] - most[p]))
            parts[j] = PredictedMemory(*sizes, workspace=0)
        sums = {key: sum(getattr(part, key) for part in parts.values()) for key in ("weights", "gradients", "optimizer", "stored")}
        found.append(PredictedMemory(**sums, temporary=max(part.temporary for part in parts.values()), stages=parts))
    return found + [PredictedMemory(0, 0, 0, 0, 0)] * (len(plan.layout.processes) - len(processes))


def stored_activations(plan: Plan) -> list[int]:
    """Return the bytes of activations that each stage stores between forward and backward, for all microbatches in flight."""
    known = Known()
    return [stage.in_flight * count_stage(plan.model, stage, plan.numerics, run=plan, known=known).stored for stage in plan.stages]


def _count_stages(plan: Plan, recipe: Recipe, targets: TensorSpec, known: Known, remote: NDArray[np.bool_]) -> list[StageMemory]:
    """Count all stages, given whether each boundary is one between processes."""
    stages, sides = plan.stages, [False, *remote.tolist(), False]
    return [
        count_stage(
            plan.model,
            stage,
            plan.numerics,
            recipe=recipe,
            targets=targets if stage is stages[-1] else None,
            run=plan,
            before=stages[j - 1] if j and not sides[j] and plan.numerics.message_format is None else None,  # rounding makes copies
            returns_input=j > 0 and returns_activations(stages[j - 1].keeps[-1]),
            remote=(sides[j], sides[j + 1]),
            known=known,
        )
        for j, stage in enumerate(stages)
    ]


def _drain(plan: Plan, stages: Sequence[StageMemory]) -> Numbers:
    """Return what backwards need more in the drain at the end than in the steady state.

    They follow one another there: two messages are being sent, and none waits for a forward.
    """
    found = np.zeros(len(stages), np.int64)
    for j, (before, stage) in enumerate(zip(plan.boundaries, plan.stages[1:], strict=True), 1):
        if stage.delay and plan.flush_every is None and plan.boundary_delays[j] % 2 == 0:
            found[j] = max(0, before.backward_bytes - before.forward_bytes - 2 * stages[j].stored)
    return found


def _states(
    plan: Plan, stages: Sequence[StageMemory], owner: Numbers, remote: NDArray[np.bool_], *, posted: bool
) -> Iterator[tuple[Round, Numbers]]:
    """Yield each round with the bytes of each stage that exist while it runs, besides its temporary and its fixed memory.

    Args:
        posted: Whether receives are posted before their messages are due, each with a buffer.
    """
    copied = np.array([stage.weights is not Weights.CURRENT for stage in plan.stages])
    casts, stored, version, graph = (_column(stages, name) for name in ("casts", "stored", "version", "graph_version"))
    double = np.array([stage.weights is Weights.DOUBLE for stage in plan.stages])
    # Graphs of double weights refer to the one version that exists anyway.
    version, graph, casts = copied * version, copied * ~double * graph, ~double * casts
    held = [(_held(b.forward, r), _held(b.backward[:-1], r)) for b, r in zip(plan.boundaries, remote.tolist(), strict=True)]
    down, up = np.array(held, np.int64).reshape(-1, 2).T
    k, flush = plan.k, plan.flush_every
    delays = np.array(plan.delays) * (flush is None)  # otherwise no update separates forward and backward
    rounds = PeriodicRounds(Timetable(plan.delays, plan.boundary_delays, 0, UNLIMITED, flush), flush or 1, lambda round_: round_)
    ahead = posted * remote * np.array([posted_receives(delay) for delay in plan.boundary_delays], np.int64)
    pending = np.array(plan.boundary_delays, np.int64) + 1
    forwards, backwards = np.zeros(len(stages), np.int64), np.zeros(len(stages), np.int64)  # microbatches done
    sending, buffers = np.zeros((2, len(remote)), np.int64), np.zeros((2, len(remote)), np.int64)  # down and up
    repeated = (round_ for _ in range(k if flush is None else 1) for round_ in rounds.period_rounds)  # until an update
    for round_ in chain(rounds.until_steady(), repeated):
        f, b = (np.zeros(len(stages), np.int64) for _ in range(2))
        f[round_.stages[round_.forward]] = b[round_.stages[~round_.forward]] = 1
        done, finished = forwards + f, backwards + b
        oldest = np.where(double, backwards // k - 1, (backwards - delays) // k)
        state = casts + (done - backwards) * stored + (backwards // k - oldest) * version + (done > backwards) * graph
        # A message from another process arrives after the round.
        waiting = np.stack([done[:-1] - remote * f[:-1] - done[1:], finished[1:] - remote * b[1:] - finished[:-1]])
        received, sends = np.where(ahead > 0, ahead, np.maximum(waiting, 0)), np.where(ahead > 0, pending, buffers)
        state[1:] += received[0] * down + sends[1] * up
        state[:-1] += received[1] * up + sends[0] * down
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


def _held(message: MessageSpec, remote: bool) -> int:
    """Return the bytes of a message that waits: inside a process it is in the type in which stages compute."""
    return sum(PackedPart(part).bytes if remote else sum(spec.bytes for spec in part) for part in message)


def _column(stages: Sequence[StageMemory], name: str) -> Numbers:
    return np.array([getattr(stage, name) for stage in stages], np.int64)
