"""Clipping by the norm of the whole network's gradient, instead of each stage's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from petra.engine.update import Clip, Pending, Update
from petra.engine.worker import Worker
from petra.plan import Plan


class PostponedUpdate(Update):
    """Updates of a stage that stop before they clip, until :class:`GlobalClip` finishes them.

    Attributes:
        pending: The update in progress.
    """

    pending: Pending

    def __call__(self, t: int) -> None:
        self.pending = self.begin(t)
        self._clip = next(i for i, part in enumerate(self.parts) if isinstance(part, Clip))
        for part in self.parts[: self._clip]:
            part.run(self.pending)

    def finish(self, squared_norm: Tensor) -> None:
        """Run the other parts, given the squared norm of the whole network's gradient."""
        self.pending.squared_clip_norm = squared_norm
        for part in self.parts[self._clip :]:
            part.run(self.pending)


class GlobalClip:
    """Finishes the updates of a rank together, once every stage has done their last microbatch.

    Args:
        plan: Plan of the run.
        workers: Workers of this rank's stages, with a :class:`PostponedUpdate` each.
        group: The ranks of this replica; None for all ranks.
    """

    def __init__(self, plan: Plan, workers: Iterable[Worker], device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._updates = [worker.update for worker in workers if isinstance(worker.update, PostponedUpdate)]
        self._k, self._device, self._group = plan.k, device, group

    def __call__(self, m: int) -> None:
        """Update if microbatch ``m``, which every stage has done, is the last of an update."""
        if (m + 1) % self._k:
            return
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for update in self._updates:
            squares += update.pending.squared_norm
        if dist.is_initialized():
            dist.all_reduce(squares, group=self._group)
        for update in reversed(self._updates):
            update.finish(squares)
