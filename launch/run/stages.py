"""Number of processes that a run can use: one for each stage of each replica."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from petra.errors import invalid

from ..config.compose import compose_command_line, training_configs
from ..config.schema import AUTO, to_config
from ..runtime.rank import Process
from .build import set_up


@dataclass(frozen=True)
class Stages:
    """Stages of a run.

    Attributes:
        model: Name of the model.
        number: Number of stages of a replica.
        dp: Number of replicas.
        gpus: Number of GPUs of this node that the run can use.
    """

    model: str
    number: int
    dp: int
    gpus: int

    def most(self, room: int | None) -> int:
        """Return the largest number of processes that the run can use.

        Args:
            room: Number of processes that the nodes take; None for no limit.
        """
        processes = self.number if room is None else min(self.number, room // self.dp)
        return max(1, processes) * self.dp

    def __str__(self) -> str:
        replicas = f" in each of {self.dp} replicas" if self.dp > 1 else ""
        return f"{self.number} stages of {self.model}{replicas}"


def count_stages(*, arguments_required: bool) -> Stages | None:
    """Return the stages of the configuration on the command line. None with ``--help``.

    Args:
        arguments_required: Refuse an empty command line, as :func:`launch.config.compose.training_configs` does.

    Raises:
        PetraError: If a configuration is invalid, or if several differ in their stages.
    """
    configs = training_configs() if arguments_required else [to_config(config) for config in compose_command_line()]
    found = []
    for config in configs:
        setup = set_up(config, Process(rank=0, world=2 * config.dp, local_rank=0, local_world=1))
        automatic = config.trainer.stages == AUTO
        number = len(setup.plan.model.blocks) if automatic else len(setup.plan.stages)
        gpus = torch.cuda.device_count() if setup.device.type == "cuda" else 0
        found.append(Stages(config.model.name, number, config.dp, gpus))
    for other in found[1:]:
        if other != found[0]:
            raise invalid("NPROC", "a number, since the runs have different stages", "stages")
    return found[0] if found else None
