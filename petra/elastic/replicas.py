"""Replicas that may be lost: the others finish the update without them.

A process all-reduces copies of its gradients, so its own gradients are intact if another process dies meanwhile. After the
all-reduce, the processes that own a stage agree whether all of them have succeeded (:mod:`petra.elastic.membership`). If not,
those that remain make a new process group and reduce their gradients again. They multiply the sums by (number of replicas before) /
(number that remain): the mean over the samples of the replicas that remain. When the pipeline has drained, the run continues in a
new generation, in which the shares of targets are those of its members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from petra.distributed import all_gather_objects
from petra.elastic.membership import Membership
from petra.engine.endpoints import DataSource
from petra.engine.options.replicas import Replicas
from petra.engine.options.shares import Parts, parts_of, real_rows
from petra.engine.options.sums import AllReduces, Packed, start_sum
from petra.engine.worker import Worker
from petra.errors import require
from petra.hooks import Hook, Hooks
from petra.plan.layout import Layout
from petra.torch_private import default_group_timeout
from petra.training import Row, Trainer
from petra.training.trainer import score_of
from petra.transport import Transport


class LossTolerantSums(AllReduces):
    """Sums over the processes that own the same stages, which complete although some of these processes are lost.

    Args:
        membership: Agreement between the processes.
        group: The processes of the current generation.
        name: Name of these sums, if there are several.
        packed: As for :class:`petra.engine.options.sums.AllReduces`.

    Attributes:
        replicas: Indices of the replicas that still take part.
    """

    def __init__(
        self, membership: Membership, group: dist.ProcessGroup, device: torch.device, name: str = "", packed: Packed | None = None
    ) -> None:
        super().__init__(group, packed)
        self._name = f"process {membership.process}{name and ', '}{name}"
        self.membership, self.replicas = membership, [*membership.generation.replicas]
        self._group: Any  # None if no other replica is left
        self._limit = default_group_timeout(device)
        self._size, self._number, self._remakes = len(self.replicas), 0, 0
        self._started: list[tuple[Tensor, Tensor]] = []
        self._failed = False

    def start(self, tensor: Tensor) -> None:
        copy = tensor.clone()
        self._started.append((tensor, copy))
        self._reduce(copy)

    def advance(self) -> None:
        try:
            super().advance()
        except RuntimeError:
            self._failed = True

    def finish(self) -> float:
        self._number += 1
        while not self._succeeded():
            self._remake_group()
            for tensor, copy in self._started:
                self._reduce(copy.copy_(tensor))
        for tensor, copy in self._started:
            tensor.copy_(copy)
        self._started.clear()
        return self._size / len(self.replicas)

    def _reduce(self, copy: Tensor) -> None:
        if self._group is None or self._failed:
            return
        try:
            self._works.append(start_sum(copy, self._group, self._packed))
        except RuntimeError:
            self._failed = True

    def _succeeded(self) -> bool:
        """Wait for the all-reduces, and return whether they have succeeded in all replicas that take part."""
        for work in self._works:  # all of them: gloo must not use a copy any more when it is written again
            try:
                work.wait()
            except RuntimeError:
                self._failed = True
        self._works.clear()
        if len(self.replicas) == 1:
            return True
        name = f"sums {self._number} of {self._name}, group {self._remakes}"
        return self.membership.agree(name, not self._failed, self.replicas)

    def _remake_group(self) -> None:
        """Make a group of the processes that remain. If that fails, so does the next all-reduce."""
        self._remakes += 1
        name = f"group {self._remakes} of {self._name}"
        self.replicas = self.membership.remaining(name, self.replicas)
        self._group, self._failed = None, False
        if len(self.replicas) > 1:
            position = self.replicas.index(self.membership.replica)
            prefix = f"{self.membership.generation.number}/{name}/gloo"
            try:
                # dist.new_group would need the default group, whose processes may have been lost
                store = PrefixStore(prefix, self.membership.store)
                self._group = dist.ProcessGroupGloo(store, position, len(self.replicas), self._limit)
            except RuntimeError:
                self._failed = True


class ElasticReplicas(Replicas, Hook):
    """Replicas of which some may be lost until the pipeline has drained.

    Accumulated gradients are carried over a drain in equal parts by all replicas, so that the factor of :class:`LossTolerantSums`
    applies to all that an update sums.

    Args:
        membership: Agreement on the replicas that take part.

    Attributes:
        start: Microbatches done when the last training began; None before. A replica lost since then took part at least until here.
    """

    def __init__(self, layout: Layout, device: torch.device, membership: Membership) -> None:
        replicas = membership.generation.replicas
        super().__init__(layout, replicas.index(membership.replica), replicas, device)
        self.membership, self._device = membership, device
        self.sums = LossTolerantSums(membership, self._dp_group, device)
        self.start: int | None = None

    def attach(self, workers: Sequence[Worker], hooks: Hooks, transport: Transport) -> None:
        """See :meth:`Replicas.attach`.

        Raises:
            ConfigError: If a layer shares batch statistics between replicas, which a lost replica would interrupt.
        """
        layers = [layer for worker in workers for layer in worker.stage.module.modules()]
        synchronized = any(getattr(layer, "synchronized", False) for layer in layers)
        require(not synchronized, "cluster.elastic", "false with layers that share batch statistics between replicas", "true")
        super().attach(workers, hooks, transport)
        hooks.append(self)

    def train_begin(self, start: int, stop: int) -> None:
        self.start = start
        for replicas in self._stages.values():
            for bucket in replicas.buckets():
                bucket /= self.size

    def _carry_over(self, worker: Worker, buckets: Sequence[Tensor], factor: float) -> None:
        for bucket in buckets:
            bucket *= factor

    def sums_of(self, name: str, packed: Packed | None) -> AllReduces:
        return LossTolerantSums(self.membership, self._dp_group, self._device, name, packed)

    def restored(self, worker: Worker) -> None:
        """Keep the gradients: :meth:`train_begin` divides them between the replicas."""

    def share(self, data: DataSource, microbatches: int, *, evaluation: bool) -> tuple[DataSource, int]:
        if not evaluation or self.size == self.layout.dp:
            return super().share(data, microbatches, evaluation=evaluation)
        share = DealtShares(data, self.layout, self.members.index(self.replica), self.size, microbatches)
        return share, -(-microbatches * self.layout.dp // self.size)

    def total(self, values: Tensor) -> None:
        self.sums.start(values)
        self.sums.finish()
        dist.all_reduce(values, group=self.pipeline_group)


class ElasticTrainer(Trainer):
    """Trainer whose processes agree at the end of each phase whether to continue with the same replicas."""

    def fit(self, epochs: int) -> list[Row]:
        """Train. If the loss of a replica interrupted the last checkpoint, write it again first: no later save would replace it."""
        if self.history and len(self.history) >= epochs:
            saved = self.checkpoints.folder / f"{self.pipeline.microbatches_done:09}"
            with self.phase("saved again"):
                if not all_gather_objects(saved.exists())[0]:
                    self._save_and_stop(score_of(self.history[-1]))
        return super().fit(epochs)

    def phase(self, name: str, *, admit: bool = False) -> AbstractContextManager[None]:
        """Return a context for a phase.

        Raises:
            MembershipChanged: In every process, at the end of the context, if replicas were lost or return.
        """
        replicas = self.pipeline.replicas
        assert isinstance(replicas, ElasticReplicas)
        return replicas.membership.concluding(f"{name} after microbatch {self.pipeline.microbatches_done}", admit=admit)


class DealtShares:
    """All shares of an evaluation, dealt to fewer replicas than there are shares: replica q of n gets shares q, q + n, ...

    Args:
        source: Source that returns whole microbatches.
        position: q.
        size: n.
        microbatches: Number of microbatches of the evaluation.
    """

    def __init__(self, source: DataSource, layout: Layout, position: int, size: int, microbatches: int) -> None:
        self._source, self._dp, self._position, self._size = source, layout.dp, position, size
        self._shares, self.batch_size = microbatches * layout.dp, layout.inputs.shape[0]

    def inputs(self, m: int) -> Tensor:
        return self._part(self._source.inputs, m)

    def targets(self, m: int) -> Tensor:
        return self._part(self._source.targets, m)

    def real_rows(self, m: int) -> int:
        """Return the number of rows of a share that are no padding: none if there are no shares left for this replica."""
        joint, part = self._place(m)
        left = m * self._size + self._position < self._shares
        return real_rows(self._source, joint, self._dp, self.batch_size)[part] if left else 0

    def parts(self, m: int) -> Parts:
        """Return the targets of all shares of the microbatch that a share belongs to."""
        joint, part = self._place(m)
        chunks = self._source.targets(joint).chunk(self._dp)
        return parts_of(self._source, joint, chunks, self.batch_size, range(self._dp), part)

    def _part(self, read: Callable[[int], Tensor], m: int) -> Tensor:
        joint, part = self._place(m)
        return read(joint).chunk(self._dp)[part]

    def _place(self, m: int) -> tuple[int, int]:
        return divmod(min(m * self._size + self._position, self._shares - 1), self._dp)
