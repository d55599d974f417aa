"""State of a method and its remedies for checkpoints: older versions of weights and what remedies accumulate."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from petra.engine.stage import Stage
from petra.engine.worker import Worker
from petra.plan import Plan

State = dict[str, dict[str, Tensor]]
"""Tensors by kind (``previous`` for older weights), then by the parameter's key in ``Pipeline.state_dict``."""


def method_state(plan: Plan, workers: Mapping[int, Worker]) -> State:
    """Return the state of a rank's stages."""
    found: State = {}
    for j, worker in workers.items():
        kinds = {"previous": worker.stage.previous()}
        for part in worker.update.parts:
            kinds |= part.tensors()
        for kind, values in kinds.items():
            named = {name: values[p] for name, p in _parameters(plan, j, worker.stage).items() if p in values}
            found.setdefault(kind, {}).update(named)
    return found


def load_method_state(plan: Plan, workers: Mapping[int, Worker], state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Load what :func:`method_state` returned, after weights, optimizers and the workers' clocks have been loaded."""
    for j, worker in workers.items():
        parameters = _parameters(plan, j, worker.stage)
        own: dict[str, dict[Tensor, Tensor]] = {
            kind: {p: values[name] for name, p in parameters.items() if name in values} for kind, values in state.items()
        }
        worker.stage.resume(worker.microbatches_done // plan.k, own.pop("previous", {}))
        for part in worker.update.parts:
            part.resume(own)


def restart_state(plan: Plan, workers: Mapping[int, Worker]) -> None:
    """Forget what depends on earlier weights: moving averages, older versions of the weights, and the state of remedies."""
    for worker in workers.values():
        for part in worker.update.parts:
            part.restart()
    load_method_state(plan, workers, {})


def _parameters(plan: Plan, j: int, stage: Stage) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a stage under the keys of ``Pipeline.state_dict``."""
    return {
        f"{plan.model.blocks[b].name}.{name}": p
        for b, block in zip(plan.stages[j].blocks, stage.module, strict=True)
        for name, p in block.named_parameters()
        if p.requires_grad
    }
