"""The optimizer that ``Trainer`` creates for the whole model, as one optimizer for each stage."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petra.distributed import message_group
from petra.errors import DataError, require
from petra.pipeline import Pipeline

GROUP = "group"
"""Key of a parameter group of a stage: index of the group of the whole optimizer."""
States = Mapping[Any, dict[str, Any]]


def without_steps(whole: torch.optim.Optimizer) -> None:
    """Let steps of an optimizer do nothing: those of the stages do. Schedules, callbacks and logs use its parameter groups."""
    whole.step = MethodType(lambda self, closure=None: None, whole)  # type: ignore[method-assign]
    whole.zero_grad = MethodType(lambda self, set_to_none=True: None, whole)  # type: ignore[method-assign]


def defaults_of(whole: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings with which an optimizer like ``whole`` is made."""
    accepted = signature(type(whole).__init__).parameters
    return {name: value for name, value in whole.defaults.items() if name in accepted}


def stage_optimizer(whole: torch.optim.Optimizer, states: States, module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer like ``whole`` for the parameters of a stage.

    Args:
        states: States of parameters, which it takes over.
    """
    own = {id(p) for p in module.parameters() if p.requires_grad}
    groups = [{**_settings(group), "params": group["params"], GROUP: i} for i, group in enumerate(whole.param_groups)]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) in own]
    made = type(whole)([group for group in groups if group["params"]], **defaults_of(whole))
    numbered = [p for group in made.param_groups for p in group["params"]]
    known = {i: states[p] for i, p in enumerate(numbered) if p in states}
    if known:
        made.load_state_dict({"state": known, "param_groups": made.state_dict()["param_groups"]})
    return made


def copy_settings(whole: torch.optim.Optimizer, pipeline: Pipeline) -> None:
    """Give the optimizers of a process's stages the learning rates, and all other settings, that ``whole`` has now."""
    for worker in pipeline.workers.values():
        for group in () if worker.update.optimizer is None else worker.update.optimizer.param_groups:
            group.update(_settings(whole.param_groups[group[GROUP]]))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group without the mark of a scheduler: the stages' optimizers have none."""
    return {key: value for key, value in group.items() if key not in ("params", "initial_lr")}


def states_of(pipeline: Pipeline) -> dict[Tensor, dict[str, Any]]:
    """Return the states of the parameters of this process."""
    optimizers = [worker.update.optimizer for worker in pipeline.workers.values()]
    return {p: state for each in optimizers if each is not None for p, state in each.state.items()}


def gather_states(whole: torch.optim.Optimizer, pipeline: Pipeline) -> dict[Tensor, dict[str, Any]]:
    """Return the states of all parameters in the process of the first stage, on the CPU, and nothing elsewhere.

    Every process must call this function.
    """
    numbered = [p for group in whole.param_groups for p in group["params"]]
    index = {id(p): i for i, p in enumerate(numbered)}
    found = {index[id(p)]: state for p, state in states_of(pipeline).items()}
    own = {i: {key: v.detach().cpu() if isinstance(v, Tensor) else v for key, v in s.items()} for i, s in found.items()}
    group = message_group()
    for rank in range(1, pipeline.world):
        message: list[Any] = [own]
        if pipeline.rank == rank:
            dist.send_object_list(message, 0, group, torch.device("cpu"))
        elif pipeline.rank == 0:
            dist.recv_object_list(message, rank, group, torch.device("cpu"))
            own |= message[0]
    return {numbered[i]: state for i, state in own.items()} if pipeline.rank == 0 else {}


@contextmanager
def without(whole: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Leave parameters out of an optimizer inside the ``with`` block, and drop their states."""
    again = {id(p) for p in parameters}
    lists = [(group["params"], [*group["params"]]) for group in whole.param_groups]
    for found, every in lists:
        found[:] = [p for p in every if id(p) not in again]
    for p in parameters:
        whole.state.pop(p, None)
    try:
        yield
    finally:
        for found, every in lists:
            found[:] = every


def read_states(whole: torch.optim.Optimizer, path: Any, tied: Sequence[Tensor] = ()) -> dict[Tensor, dict[str, Any]]:
    """Return the states of parameters in a file ``optimizer.pt``, and give the groups of ``whole`` the settings in it.

    Args:
        tied: Parameters that share weights elsewhere. The file has the state of the first one only.

    Raises:
        DataError: If it is of another optimizer or another model.
    """
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    with without(whole, tied[1:]):
        sizes, expected = ([len(g["params"]) for g in groups] for groups in (loaded["param_groups"], whole.param_groups))
        require(sizes == expected, str(path), f"groups of {expected} parameters", sizes, DataError)
        numbered = [p for group in whole.param_groups for p in group["params"]]
    for group, read in zip(whole.param_groups, loaded["param_groups"], strict=True):
        group.update({key: value for key, value in read.items() if key != "params"})
    found = {numbered[i]: state for i, state in loaded["state"].items()}
    return found | {p: copy.deepcopy(found[tied[0]]) for p in tied[1:] if tied[0] in found}
