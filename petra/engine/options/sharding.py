"""Optimizer state divided over replicas: stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054).

Each trained parameter of a stage belongs to one replica. Only this replica has its optimizer state and updates it, and then
broadcasts it to the others. Weights and gradients stay whole in every replica, because passes of other microbatches use the weights
at any time between two updates.

torch's ZeroRedundancyOptimizer divides in the same way, but hides the optimizer that it contains: its own ``state`` is empty, its
``state_dict`` needs the state of all replicas in one process, and it does not pass on ``found_inf``. Here, a stage's optimizer
stays an ordinary one, of fewer parameters, and each replica saves its own state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from petra.engine.update import OptimizerStep, Part, Pending
from petra.engine.worker import Worker
from petra.errors import require
from petra.transport.port import locate_errors

SEPARATE = ("torch.optim.", "petra.training.")
"""Modules whose optimizers update each parameter without regard to the others, so that a share of them gives the same bits."""


def divide(parameters: Sequence[Tensor], replicas: int) -> list[list[Tensor]]:
    """Return the parameters that belong to each replica. From the largest on, each goes to the replica that has least."""
    shares: list[list[Tensor]] = [[] for _ in range(replicas)]
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
        min(shares, key=elements).append(parameter)
    return shares


def elements(share: Sequence[Tensor]) -> int:
    """Return the number of elements of all tensors."""
    return sum(map(Tensor.numel, share))


def keep_share(optimizer: torch.optim.Optimizer, shares: Sequence[Sequence[Tensor]], own: int) -> None:
    """Remove the parameters of other replicas from an optimizer, with their state.

    Args:
        optimizer: Optimizer of all parameters of a stage.
        shares: The parameters of each replica.
        own: Index of the replica whose parameters stay.

    Raises:
        ConfigError: If it is not known of the optimizer that it updates each parameter on its own.
    """
    kind = type(optimizer)
    expected = "false with an optimizer that is neither torch's nor petra's"
    require(kind.__module__.startswith(SEPARATE), "optim.shard", expected, f"true with {kind.__name__}")
    others = {p for i, share in enumerate(shares) if i != own for p in share}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in others]
    for p in others:
        optimizer.state.pop(p, None)


def divide_state(worker: Worker, group: dist.ProcessGroup) -> None:
    """Divide the optimizer state of a stage from now on.

    Args:
        worker: Worker of the stage, before its first update.
        group: The processes that own the stage, one in each replica.
    """
    parts, optimizer = worker.update.parts, worker.update.optimizer
    if optimizer is not None:
        shares = divide(worker.stage.gradients.parameters, group.size())
        keep_share(optimizer, shares, group.rank())
        step = next(i for i, part in enumerate(parts) if isinstance(part, OptimizerStep))
        parts.insert(step + 1, BroadcastWeights(worker.index, shares, group))


class BroadcastWeights(Part):
    """Sends the updated weights of each replica to the others. Comes after the step.

    Args:
        stage: Index of the stage, for messages.
        shares: The parameters of each replica, in the order of the group's ranks.
        group: The processes that own the stage.
    """

    def __init__(self, stage: int, shares: Sequence[Sequence[Tensor]], group: dist.ProcessGroup) -> None:
        self._stage, self._shares, self._group = stage, shares, group

    def run(self, pending: Pending) -> None:
        """Broadcast all weights, also after a skipped step: the host need not know of it. On a GPU, only the CUDA stream waits.

        Raises:
            CommunicationError: If another replica has failed, hangs, or can't be reached.
        """
        with locate_errors("broadcasting", f"the weights of stage {self._stage + 1} to replicas", pending.t - 1):
            # One message for each parameter: a joint buffer would need a copy, or lose the memory format of the weights. Writing to
            # .data keeps the version counter, because graphs of microbatches in flight refer to the weights (Stage.updating).
            works = [
                dist.broadcast(parameter.data, group=self._group, group_src=owner, async_op=True)
                for owner, share in enumerate(self._shares)
                for parameter in share
            ]
            for work in works:
                assert work is not None
                work.wait()
