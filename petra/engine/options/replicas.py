"""Data parallelism: replicas of all stages. Each trains on its share of every microbatch; gradients are summed over replicas.

Gradients are all-reduced block by block, while the last backward before an update still runs through earlier blocks. The
all-reduces have a process group of their own and follow the order of the schedule, which is the same in every replica. The proof
that the schedule is free of deadlock therefore covers them too (docs/data_parallel.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from petra.engine.endpoints import DataSource, RefetchSource
from petra.engine.options.finite_check import FiniteCheck
from petra.engine.options.optimizer_state import Kinds
from petra.engine.options.outer_step import OuterUpdate
from petra.engine.options.shares import Parts, parts_of, real_rows
from petra.engine.options.sums import AllReduces, Packed
from petra.engine.stage import Stage
from petra.engine.update import Part, Pending
from petra.engine.worker import Worker
from petra.errors import require
from petra.hooks import Hooks
from petra.plan import Plan
from petra.plan.layout import Layout
from petra.reversible import running_statistics
from petra.torch_private import default_group_timeout, inner_tensors
from petra.transport import Transport
from petra.transport.port import locate_errors


class Share:
    """One replica's rows of a data source: B rows from row r · B on, where B is the replica's batch size.

    The data source may return only this replica's inputs, so that no process reads inputs that it does not need. It always
    returns the targets of all replicas.

    Args:
        members: Replicas that take part. The rows of others are left out.
    """

    def __init__(self, source: DataSource, layout: Layout, replica: int, members: Sequence[int]) -> None:
        self._source, self._rows, self._replica, self._dp = source, layout.inputs.shape[0], replica, layout.dp
        self._members, self.batch_size = members, layout.inputs.shape[0]
        self._parts: dict[int, Parts] = {}

    def inputs(self, m: int) -> Tensor:
        return self._own(self._source.inputs(m))

    def refetch(self, m: int) -> Tensor:
        assert isinstance(self._source, RefetchSource)
        return self._own(self._source.refetch(m))

    def targets(self, m: int) -> Tensor:
        joint = self._source.targets(m)
        self._parts[m] = parts_of(self._source, m, joint.chunk(self._dp), self.batch_size, self._members, self._replica)
        return self._part(joint)

    def real_rows(self, m: int) -> int:
        """Return the number of rows of this share of microbatch ``m`` that are no padding."""
        return real_rows(self._source, m, self._dp, self.batch_size)[self._replica]

    def parts(self, m: int) -> Parts:
        """Return the targets of all shares of microbatch ``m``, once, after they were read.

        Reading them again would restart workers that prepare targets, and on a GPU another thread may be reading.
        """
        return self._parts.pop(m)

    def _own(self, x: Tensor) -> Tensor:
        return self._part(x) if len(x) == self._dp * self._rows else x

    def _part(self, joint: Tensor) -> Tensor:
        return joint.chunk(self._dp)[self._replica]


class OwnShare(Share):
    """Share of a replica that trains apart, whose loss depends on its own targets only."""

    def targets(self, m: int) -> Tensor:
        return self._part(self._source.targets(m))


class Replicas:
    """All-reduces the gradients of this process's stages over replicas. Every process makes the same calls.

    Args:
        position: Position of this replica in ``members``.
        members: Indices of the replicas that take part, in the order of their ranks.

    Attributes:
        pipeline_group: Processes of this replica; of those that divide its stages, one for each stage.
        mesh: Dimensions ``dp`` and ``stage``, and ``tp`` if stages are divided.
        replica: Index of this replica.
        first: Whether this replica provides the state of the run.
        size: Number of replicas that take part.
        member: Index of this process among those that divide its stages.
        apart: Whether replicas train apart between outer steps, so that each has a state of its own.
    """

    member, apart = 0, False

    def __init__(self, layout: Layout, position: int, members: Sequence[int], device: torch.device) -> None:
        size = len(members)
        shape = {"dp": size, "stage": len(layout.processes)} | ({"tp": layout.tp} if layout.tp > 1 else {})
        self.mesh = init_device_mesh(device.type, (*shape.values(),), mesh_dim_names=(*shape,))
        self._dp_group, self.pipeline_group = self.mesh.get_group("dp"), self.mesh.get_group("stage")
        for group in self.mesh.get_all_groups():
            group.set_timeout(default_group_timeout(device))
        self.layout, self.members, self.size = layout, members, size
        self.replica, self.first = members[position], position == 0
        self.sums = AllReduces(self._dp_group)
        self._workers: Sequence[Worker] = ()
        self._stages: dict[int, ReplicaSum] = {}

    def divided(self, plan: Plan) -> Plan:
        """Return the plan by which this process builds its blocks."""
        return plan

    def share_weights(self, stages: Iterable[Stage]) -> None:
        """Broadcast the first replica's parameters and buffers: modules made without a seed differ between processes."""
        first = dist.get_global_rank(self._dp_group, 0)
        for tensor in (t for stage in stages for t in (*stage.module.parameters(), *stage.module.buffers())):
            for part in inner_tensors(tensor.detach()).values() or [tensor.detach()]:
                own = part.contiguous().flatten().view(torch.uint8)  # bytes: NCCL and gloo lack some types
                dist.broadcast(shared := own.clone(), first, self._dp_group)
                if not torch.equal(own, shared):
                    part.copy_(shared.view(part.dtype).view(part.shape))

    def attach(self, workers: Sequence[Worker], hooks: Hooks, transport: Transport) -> None:
        """All-reduce the gradients of ``workers`` from now on. Gradients become views of buffers, each all-reduced as a whole.

        A module with a method ``join_replicas`` gets the process group of its
        stage's replicas, over which layers may share their batch statistics. All replicas run the same steps in the same order, so
        these collectives also have the same order in every replica.
        """
        self._workers = workers
        for worker in workers:
            if self.apart:
                self._join_outer_steps(worker)
                continue
            for layer in worker.stage.module.modules():
                join = getattr(layer, "join_replicas", None)
                if join is not None:
                    join(self._dp_group)
            replicas = self._stages[worker.index] = ReplicaSum(worker, self.sums)
            worker.stage.gradients.on_block = replicas.start
            worker.update.parts.insert(0, replicas)
            if worker.update[FiniteCheck].rules.shard:
                from petra.engine.options.sharding import divide_state

                divide_state(worker, self._dp_group)

    def synchronize(self) -> None:
        """Combine the states of all replicas of a drained pipeline into one that can be resumed with any number of replicas.

        Gradients accumulated since the last update are summed on the first replica and set to zero on the others, unless replicas
        train apart. Running statistics become their mean over replicas. Moving averages are linear, so this equals a mean after
        each microbatch.
        """
        for worker in self._workers:
            buckets = [] if self.apart else self._stages[worker.index].buckets()
            statistics = [*running_statistics(worker.stage.module), *worker.update[FiniteCheck].finite.values()]
            parts = _by_dtype(statistics)
            joints = [torch.cat([t.flatten() for t in tensors]) for tensors in parts]
            for tensor in (*buckets, *joints):
                self.sums.start(tensor)
            factor = self.sums.finish()
            self._carry_over(worker, buckets, factor)
            for tensors, joint in zip(parts, joints, strict=True):
                means = torch.split(joint * factor / self.size, [t.numel() for t in tensors])
                for tensor, mean in zip(tensors, means, strict=True):
                    tensor.copy_(mean.view_as(tensor))

    def _join_outer_steps(self, worker: Worker) -> None:
        synchronized = any(getattr(layer, "synchronized", False) for layer in worker.stage.module.modules())
        require(not synchronized, "outer.every", "0 with layers that share batch statistics between replicas", "more")
        for outer in (part for part in worker.update.parts if isinstance(part, OuterUpdate)):
            outer.join(self.sums_of(f"stage {worker.index + 1}", outer.packed), self.size)

    def sums_of(self, name: str, packed: Packed | None) -> AllReduces:
        """Return further sums, which may be in progress at the same time as others."""
        return AllReduces(self._dp_group, packed)

    def _carry_over(self, worker: Worker, buckets: Sequence[Tensor], factor: float) -> None:
        """Keep gradients of a drained pipeline, which are sums over replicas now, so that the next update counts them once."""
        for bucket in buckets:
            if not self.first:
                bucket.zero_()

    def whole(self, kinds: Kinds) -> Kinds:
        """Return the state of a stage's parameters with the shapes of the model."""
        return kinds

    def own(self, kinds: Kinds) -> Kinds:
        """Return the state of a stage's parameters, given with the shapes of the model, with those of the parameters."""
        return kinds

    def restored(self, worker: Worker) -> None:
        """Adapt the gradients that a stage has loaded, which are sums over replicas unless these train apart."""
        if not (self.first or self.apart):
            worker.stage.gradients.zero()

    def share(self, data: DataSource, microbatches: int, *, evaluation: bool) -> tuple[DataSource, int]:
        """Return this replica's part of ``microbatches`` microbatches of a data source, and its number of microbatches."""
        kind = OwnShare if self.apart else Share
        return kind(data, self.layout, self.replica, self.members), microbatches

    def total(self, values: Tensor) -> None:
        """Replace values of one process of each replica by their sum, in all processes. The others pass zeros."""
        dist.all_reduce(values)


class ReplicaSum(Part):
    """All-reduces of one stage. As the first part of an update, waits until the gradients are sums over replicas.

    Args:
        sums: Sums over the processes that own the stage.
    """

    events = ("all_reduce_begin", "all_reduce_end")

    def __init__(self, worker: Worker, sums: AllReduces) -> None:
        self.worker, self.sums = worker, sums
        self._buckets = [_buckets(list(runner.parameters.values())) for runner in worker.stage.runners]

    def buckets(self) -> list[Tensor]:
        """Return the buffers of the stage's accumulated gradients."""
        return [bucket for buckets in self._buckets for bucket in buckets]

    def start(self, block: int) -> None:
        """Start to all-reduce the gradients of a block after its backward, if an update follows this microbatch.

        Args:
            block: Position of the block in the stage.
        """
        if (self.worker.microbatches_done + 1) % self.worker.stage.gradients.k == 0:
            for bucket in self._buckets[block]:
                self.sums.start(bucket)

    def run(self, pending: Pending) -> None:
        """Sum what an update depends on over replicas. On a GPU, only the CUDA stream waits.

        Raises:
            CommunicationError: If another replica has failed, hangs, or can't be reached.
        """
        worker = self.worker
        check, gradients = worker.update[FiniteCheck], worker.stage.gradients
        values = [*check.sums(), gradients.used(check.device)]
        joint = torch.cat([value.flatten() for value in values])
        with locate_errors("all-reducing", f"the gradients of stage {worker.index + 1} over replicas", pending.t - 1):
            self.sums.start(joint)
            factor = self.sums.finish()
        if factor != 1:
            for bucket in self.buckets():
                bucket *= factor
        *sums, used = torch.split(joint, [value.numel() for value in values])
        check.set_sums([total.view(()) for total in sums])
        gradients.add_used(used)


def _buckets(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return one buffer for each dtype, and make the parameters' gradients views of it, in the parameters' memory format."""
    buckets = []
    for tensors in _by_dtype(parameters):
        bucket = torch.zeros(sum(p.numel() for p in tensors), dtype=tensors[0].grad_dtype, device=tensors[0].device)
        for parameter, part in zip(tensors, torch.split(bucket, [p.numel() for p in tensors]), strict=True):
            parameter.grad = part.as_strided(parameter.shape, parameter.stride())
        buckets.append(bucket)
    return buckets


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    ordered = sorted(tensors, key=lambda t: str(t.dtype))
    return [list(group) for _, group in groupby(ordered, key=lambda t: t.dtype)]
