"""A run that continues when replicas are lost, and takes restarted ones back (``cluster.elastic``).

The processes of each replica are started together, and restarted together if one of them fails. Between two changes of the
replicas, a *generation* trains as any other run does, in process groups of its own. A new generation starts from the state that the
replicas of the last one have in memory, which the first of them sends to the others.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from petra.distributed import all_gather_objects, message_group
from petra.elastic.liveness import Member
from petra.elastic.membership import Membership, MembershipChanged
from petra.elastic.replicas import ElasticReplicas, ElasticTrainer
from petra.errors import PetraError
from petra.training import JsonLines
from petra.training.state import state_of
from petra.training.weight_files import State

from ..config.schema import Config
from ..run.build import Setup, set_up
from ..run.records import exclusive_folder
from ..run.resume import Start, find_start
from ..run.training import TrainingRun, prepare_process
from ..run.undo import RunFolder
from ..runtime.agent import StopRequest
from ..runtime.rank import Process
from ..runtime.reporting import STOPPED
from .processes import Replica

EVENTS = "replicas.jsonl"
"""File in the run's folder with the replicas that were lost and that returned."""


@dataclass
class Handover:
    """What a process keeps in memory for the next generation.

    Attributes:
        facts: Facts as in a checkpoint, with the clock.
        members: Replicas of the last generation.
        start: Microbatches done when the last training of the generation began.
        absent: Microbatches that a replica may have missed begin here, for replicas that were lost and have not returned.
        state: State of this process's stages.
        apart: Whether replicas train apart, so that those that remain keep their own state.
    """

    facts: dict[str, Any]
    members: tuple[Member, ...]
    start: int
    absent: dict[int, int] = field(default_factory=dict)
    state: State = field(default_factory=dict)
    apart: bool = False


def run(config: Config, process: Process) -> None:
    """Train one configuration with ``cluster.elastic``. Every process of the run must call this function.

    Raises:
        PetraError: If the configuration or its data cannot be used, or if this process can't reach the others of its replica.
    """
    replica = Replica.from_environment(process, config.dp)
    setup = set_up(config, replica.in_run(range(config.dp)))
    prepare_process(setup)
    membership = replica.membership(str(config.run_dir), config.trainer.timeout)
    stop, handover = StopRequest(), None
    with stop.handle_signals():
        while (generation := membership.join(stop if handover is None else None)) is not None:
            own = replica.in_run(generation.replicas)
            group = PrefixStore(f"{generation.number}/group", membership.store)
            with own.process_group(setup.device, config.trainer.timeout, group), exclusive_folder(config, own) as folder:
                finished, handover = run_generation(setup, own, membership, stop, handover, folder)
            if finished:
                membership.finish()
    if stop():
        sys.exit(STOPPED)  # while it waited for a generation


def run_generation(
    setup: Setup,
    process: Process,
    membership: Membership,
    stop: StopRequest,
    handover: Handover | None,
    folder: RunFolder | None,
) -> tuple[bool, Handover | None]:
    """Train until the end of the run or until the replicas change. Return whether the run has ended, and a handover.

    Args:
        process: Rank in the generation.
        stop: Whether this process was asked to stop.
        handover: Of the generation before; None after the start of this process.
        folder: Folder of the run in the first process, None in the others.
    """
    try:
        with membership.concluding("started"):
            shared = share(handover, membership)
            start = (
                Start(Path(str(setup.config.run_dir)), shared.facts, state=shared.state)
                if shared
                else find_start(setup.config, process)
            )
            replicas = ElasticReplicas(setup.plan.layout, setup.device, membership)
            current = TrainingRun(setup, process, start, stop, folder, replicas, ElasticTrainer)
            absent = report_changes(current, membership, shared)
    except MembershipChanged:
        return False, handover
    try:
        current.fit()
        with membership.concluding("finished"):
            current.finish()
    except MembershipChanged:
        return False, hand_over(current, membership, absent)
    except Exception:
        membership.leave()
        raise
    return True, None


def hand_over(run: TrainingRun, membership: Membership, absent: dict[int, int]) -> Handover:
    """Return what the next generation needs, from a drained pipeline."""
    with suppress(PetraError, RuntimeError):  # a save in the background that a lost process has interrupted
        run.checkpoints.wait()
    replicas = run.pipeline.replicas
    assert isinstance(replicas, ElasticReplicas)
    state = {key: value.to("cpu", copy=True) for key, value in state_of(run.pipeline, every_replica=True).items()}
    facts = {**run.checkpoints.facts, "trainer": run.trainer.state(), "clock": (clock := run.pipeline.microbatches_done)}
    start = clock if replicas.start is None else replicas.start
    return Handover(facts, membership.generation.members, start, absent, state, replicas.apart)


def share(handover: Handover | None, membership: Membership) -> Handover | None:
    """Return the handover of the first replica of the generation with its state for this process, or None if it has none.

    A replica that trains apart and was there keeps its own state. Every process must call this function.
    """
    processes, rank = membership.liveness.processes, dist.get_rank()
    gathered: list[Handover | None] = all_gather_objects(handover and replace(handover, state={}))
    first = gathered[0]
    if first is None:
        return None
    keeps = [first.apart and each is not None and each.facts["clock"] == first.facts["clock"] for each in gathered]
    group = message_group()
    message = [None if handover is None else handover.state]
    for receiver in (r for r in range(processes, dist.get_world_size()) if not keeps[r]):
        if rank == receiver % processes:
            dist.send_object_list(message, receiver, group, torch.device("cpu"))
        if rank == receiver:
            dist.recv_object_list(message, receiver % processes, group, torch.device("cpu"))
    first.state = message[0] or {}
    return first


def report_changes(run: TrainingRun, membership: Membership, handover: Handover | None) -> dict[int, int]:
    """Print and record which replicas were lost and which return. Return the new :attr:`Handover.absent`."""
    if handover is None:
        return {}
    clock, rows, members = int(handover.facts["clock"]), run.pipeline.plan.layout.inputs.shape[0], membership.generation.members
    absent = dict(handover.absent)

    def record(text: str, **event: Any) -> None:
        if run.records is not None:
            print(text, flush=True)
            JsonLines(run.folder / EVENTS).log(event | {"time": time.time()})

    for replica, _ in (member for member in handover.members if member not in members):
        absent[replica] = handover.start
        text = f"replica {replica + 1} was lost after microbatch {handover.start}; the others continue without it"
        record(text, event="lost", replica=replica + 1, microbatch=handover.start)
    for replica, _ in (member for member in members if member not in handover.members):
        first, low, high = absent.pop(replica, clock), replica * rows, (replica + 1) * rows - 1
        samples = (clock - first) * rows
        which = f" samples {low} to {high} of microbatches {first + 1} to {clock}," if samples else ""
        text = f"replica {replica + 1} returns after microbatch {clock}; it missed at most{which} {samples} samples"
        missed = {"first": first + 1, "last": clock, "rows": [low, high], "samples": samples}
        record(text, event="back", replica=replica + 1, microbatch=clock, missed=missed)
    return absent
