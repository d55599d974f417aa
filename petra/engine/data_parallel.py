"""Data parallelism: replicas of all stages, each of which takes its share of every microbatch, and one gradient for all of them.

A stage's gradients are summed over its replicas block by block, while the last backward before an update still goes through the
blocks in front. The sums run in a process group of their own, in the order of the timetable, which is the same in every line: so
the timetable's proof that no message deadlocks covers them too (docs/data_parallel.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from petra.engine.block import BlockRunner
from petra.engine.endpoints import DataSource, Objective
from petra.engine.metrics import count_targets
from petra.engine.worker import Worker
from petra.plan.layout import Layout
from petra.reversible import derive_seed, normalisations
from petra.specs import Message
from petra.transport.port import locate_errors


def share_seed(seed: int, replica: int) -> int:
    """Seed of the random numbers that blocks of a replica draw: the run's own for the first, so that one replica draws as none."""
    return derive_seed(seed, -1, replica) if replica else seed


class Share:
    """One replica's rows of a stream: row r · B / D and those after it, of B rows for D replicas.

    The stream may also give this replica's inputs alone, so that nobody reads the others'; targets it always gives for all.
    """

    def __init__(self, stream: DataSource, layout: Layout, replica: int) -> None:
        self._stream, self._rows, self._replica, self._dp = stream, layout.inputs.shape[0], replica, layout.dp

    def inputs(self, m: int) -> Tensor:
        x = self._stream.inputs(m)
        return self._part(x) if len(x) == self._dp * self._rows else x

    def targets(self, m: int) -> Tensor:
        return self._part(self._stream.targets(m))

    def weight(self, m: int) -> float:
        """Which part of the targets that count in microbatch m is this share's."""
        joint = self._stream.targets(m)
        return int(count_targets(self._part(joint))) / max(int(count_targets(joint)), 1)

    def _part(self, joint: Tensor) -> Tensor:
        return joint.chunk(self._dp)[self._replica]


class ShareObjective(Objective):
    """The loss behind one replica's last stage: δ is that of the joint microbatch's mean, so that gradients only need adding up."""

    def send(self, m: int, message: Message) -> None:
        super().send(m, message)
        output, (gradient,), report = self._pending[m]
        assert isinstance(self.data, Share)
        weight = self.data.weight(m)
        # The mean over no targets is no number.
        weighted = weight * gradient if weight else torch.zeros_like(gradient)
        self._pending[m] = output, (weighted,), report

    def _report(self, output: Tensor, targets: Tensor, loss: Tensor) -> Tensor:
        report = super()._report(output, targets, loss)
        return torch.where(report[0] > 0, report, 0.0)


class Replicas:
    """This process among those that hold the same stages, one in each line; every process makes the same calls.

    Attributes:
        group: of those processes.
        line: the group of the processes of this replica.
    """

    def __init__(self, layout: Layout, replica: int, device: torch.device) -> None:
        mesh = init_device_mesh(device.type, (layout.dp, len(layout.processes)), mesh_dim_names=("dp", "stage"))
        self.group, self.line = mesh.get_group("dp"), mesh.get_group("stage")
        patience = dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]
        for group in (self.group, self.line):
            group.set_timeout(patience)  # or it would be torch's
        self.replica, self.dp = replica, layout.dp
        self.stages: list[StageReplicas] = []

    def join(self, workers: Sequence[Worker]) -> None:
        """Sums the gradients of this process's workers from now on; they move into buffers that are summed as a whole."""
        self.stages = [StageReplicas(worker, self.group) for worker in workers]

    def settle(self) -> None:
        """Makes a drained pipeline's state that of one replica, which may be saved, or go on under any number of them.

        What has been accumulated since the last update goes to the first replica. Running statistics become the mean over the
        replicas; being moving averages themselves they may just as well be averaged now as after each microbatch.
        """
        for stage in self.stages:
            for bucket in stage.buckets():
                dist.all_reduce(bucket, group=self.group)
                if self.replica:
                    bucket.zero_()
            statistics = [t for layer in normalisations(stage.worker.stage.module) for t in _statistics(layer)]
            for tensors in _by_type(statistics):
                joint = torch.cat([t.flatten() for t in tensors])
                dist.all_reduce(joint, group=self.group)
                for tensor, mean in zip(tensors, torch.split(joint / self.dp, [t.numel() for t in tensors]), strict=True):
                    tensor.copy_(mean.view_as(tensor))


class StageReplicas:
    """One stage's sums over its replicas."""

    def __init__(self, worker: Worker, group: dist.ProcessGroup) -> None:
        self.worker, self.group = worker, group
        self._buckets = {runner: _buckets(list(runner.parameters.values())) for runner in worker.stage.runners}
        self._works: list[dist.Work] = []
        worker.stage.after_block, worker.update.all_reduce = self.start, self.finish

    def buckets(self) -> list[Tensor]:
        """The stage's accumulated gradients."""
        return [bucket for buckets in self._buckets.values() for bucket in buckets]

    def start(self, block: BlockRunner) -> None:
        """Begins to sum the gradients of a block whose backward is done, if an update follows."""
        if (self.worker.t + 1) % self.worker.stage.k == 0:
            for bucket in self._buckets[block]:
                work = dist.all_reduce(bucket, group=self.group, async_op=True)
                assert work is not None
                self._works.append(work)

    def finish(self, m: int, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Waits until all gradients are sums, on a GPU on its stream; returns the sums of these ``numbers`` too.

        Raises:
            CommunicationError: another replica has died, hangs, or can't be reached.
        """
        joint = torch.stack(numbers)
        with locate_errors("summing", f"the gradients of stage {self.worker.update.number} over its replicas", m):
            for work in self._works:
                work.wait()
            dist.all_reduce(joint, group=self.group)
        self._works.clear()
        return joint.unbind()


def _buckets(parameters: Sequence[Tensor]) -> list[Tensor]:
    """One buffer for each type of parameters, of which their gradients become views in their own memory format."""
    buckets = []
    for tensors in _by_type(parameters):
        bucket = torch.zeros(sum(p.numel() for p in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
        for parameter, part in zip(tensors, torch.split(bucket, [p.numel() for p in tensors]), strict=True):
            parameter.grad = part.as_strided(parameter.shape, parameter.stride())
        buckets.append(bucket)
    return buckets


def _by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    ordered = sorted(tensors, key=lambda t: str(t.dtype))
    return [list(group) for _, group in groupby(ordered, key=lambda t: t.dtype)]


def _statistics(layer: torch.nn.modules.batchnorm._NormBase) -> list[Tensor]:
    return [t for t in (layer.running_mean, layer.running_var) if t is not None]
