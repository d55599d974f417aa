"""Which replicas, and which loss, a pipeline with several replicas or divided layers has."""

from __future__ import annotations

import torch

from petra.engine.endpoints import LossPort
from petra.engine.options.outer_step import OuterStep
from petra.engine.options.replicas import Replicas
from petra.engine.options.shares import ShareLossPort
from petra.engine.recipe import Recipe
from petra.errors import require
from petra.plan import Plan
from petra.settings import Runtime


def replicas_of(
    plan: Plan, recipe: Recipe, runtime: Runtime, device: torch.device, position: int, given: Replicas | None
) -> tuple[type[LossPort], Replicas]:
    """Return the class of the loss port, and this rank's view of the replicas.

    Args:
        position: Position of this rank's replica.
        given: Replicas that may be lost, or None.

    Raises:
        ConfigError: If layers are divided and replicas train apart.
    """
    layout = plan.layout
    every = max((each.every for each in recipe.extensions if isinstance(each, OuterStep)), default=0)
    if layout.tp > 1:
        from petra.engine.options.tensor_parallel import TensorReplicas

        require(not every, "outer.every", f"0 with tp={layout.tp}", every)
        return (ShareLossPort if layout.dp > 1 else LossPort), TensorReplicas(layout, position, recipe, runtime, device, given)
    replicas = Replicas(layout, position, range(layout.dp), device) if given is None else given
    replicas.apart = bool(every)
    return (LossPort if replicas.apart else ShareLossPort), replicas
