"""Clipping by the norm of the whole network's gradient, instead of each stage's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from petra.engine.update import Pending, Update
from petra.engine.worker import Worker


class PostponedUpdate(Update):
    """Updates of a stage that stop after the norm, until :class:`GlobalClip` finishes them.

    Attributes:
        pending: The update in progress.
    """

    pending: Pending

    def __call__(self, t: int) -> None:
        self.pending = self.begin(t)


class GlobalClip:
    """Finishes the updates of a rank together, once every stage has done the last microbatch of an update.

    Args:
        workers: Workers of this rank's stages, with a :class:`PostponedUpdate` each.
        k: Microbatches per update.
        group: The ranks of this replica; None for all ranks.
    """

    def __init__(self, workers: Sequence[Worker], k: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._updates = [worker.update for worker in workers if isinstance(worker.update, PostponedUpdate)]
        self._k, self._device, self._group = k, device, group

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
            update.pending.clip_norm = squares
            update.finish(update.pending)
