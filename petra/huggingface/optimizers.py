"""The optimizer that ``Trainer`` creates for the whole model, as one optimizer for each stage."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petra.distributed import message_group
from petra.errors import DataError, ModelError, invalid, require
from petra.huggingface.replaced import replaced
from petra.pipeline import Pipeline

GROUP, COPIED = "group", "copied"
"""Keys of a parameter group of a stage: index of the group of the whole optimizer, and the settings last copied from it."""
States = Mapping[Any, dict[str, Any]]


class _Elsewhere(defaultdict[Any, Any]):
    """States of an optimizer that stages have: changes of them here would be lost."""

    def _refuse(self, *others: Any, **named: Any) -> Any:
        expected = "callbacks that leave it alone: the stages have the states"
        raise invalid("optimizer.state", expected, "one that does not", ModelError)

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refuse
    get = items = keys = values = clear = pop = popitem = setdefault = update = _refuse


def without_steps(whole: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Let steps of an optimizer do nothing inside the ``with`` block: those of the stages do, and have its states.

    Schedules, callbacks and logs use its parameter groups.
    """
    step = MethodType(lambda self, closure=None: None, whole)
    zero_grad = MethodType(lambda self, set_to_none=True: None, whole)
    return replaced(whole, step=step, zero_grad=zero_grad, state=_Elsewhere())


def stage_optimizer(whole: torch.optim.Optimizer, states: States, module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer like ``whole`` for the parameters of a stage.

    Args:
        states: States of parameters, which it takes over, as it does those of ``whole``.

    Raises:
        ModelError: If it lacks parameters, or its weights in training and in evaluation differ.
    """
    modes = callable(getattr(whole, "train", None)) or callable(getattr(whole, "eval", None))
    expected = "one whose weights are the same in training and evaluation (no schedule-free one)"
    require(not modes, "optimizer", expected, type(whole).__name__, ModelError)
    own = {id(p) for p in module.parameters() if p.requires_grad}
    count = len(own - {id(p) for group in whole.param_groups for p in group["params"]})
    require(
        count == 0, "optimizer", "one of all parameters that require gradients (freeze others)", f"one without {count}", ModelError
    )
    made = like(whole, [[p for p in group["params"] if id(p) in own] for group in whole.param_groups])
    numbered = [p for group in made.param_groups for p in group["params"]]
    given = {**whole.state, **states}
    known = {i: given[p] for i, p in enumerate(numbered) if p in given}
    if known:
        made.load_state_dict({"state": known, "param_groups": made.state_dict()["param_groups"]})
    return made


def like(whole: torch.optim.Optimizer, groups: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer, with all that its constructor or its user has set, for other parameters, without states.

    Args:
        groups: Parameters that have the settings of the first groups.
    """
    shared: dict[int, Any] = {id(p): p for group in whole.param_groups for p in group["params"]}
    made: torch.optim.Optimizer = object.__new__(type(whole))
    own = ("step", "zero_grad", "state", "param_groups")
    shared |= {id(hook): hook for name, hooks in vars(whole).items() if name.endswith("_hooks") for hook in hooks.values()}
    made.__dict__ = {name: copy.deepcopy(value, shared) for name, value in vars(whole).items() if name not in own}
    made.state, made.param_groups = defaultdict(dict), []
    for i, (group, parameters) in enumerate(zip(whole.param_groups, groups, strict=False)):
        if parameters:
            made.param_groups.append({**_settings(group), "params": [*parameters], GROUP: i, COPIED: _settings(group)})
    return made


def copy_settings(whole: torch.optim.Optimizer, pipeline: Pipeline) -> None:
    """Give the optimizers of a process's stages the learning rates, and all other settings, that have changed in ``whole``.

    What an optimizer counts in its groups stays, as ``whole`` makes no steps.
    """
    for each in optimizers_of(pipeline):
        for group in each.param_groups:
            settings = _settings(whole.param_groups[group[GROUP]])
            group.update(_changed(settings, group[COPIED]))
            group[COPIED] = settings


def settings_of(whole: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of an optimizer without its learning rates."""
    return [{key: value for key, value in _settings(group).items() if key != "lr"} for group in whole.param_groups]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group without the mark of a scheduler: the stages' optimizers have none."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in ("params", "initial_lr", GROUP, COPIED)
    }


def _changed(settings: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in before or before[key] != value}


def states_of(pipeline: Pipeline) -> dict[Tensor, dict[str, Any]]:
    """Return the states of the parameters of this process."""
    return {p: state for each in optimizers_of(pipeline) for p, state in each.state.items()}


def optimizers_of(pipeline: Pipeline) -> list[torch.optim.Optimizer]:
    """Return the optimizers of this process's stages."""
    return [each for worker in pipeline.workers.values() if (each := worker.update.optimizer) is not None]


def gather_states(whole: torch.optim.Optimizer, pipeline: Pipeline) -> dict[Tensor, dict[str, Any]]:
    """Return the states of all parameters in the process of the first stage, on the CPU, and nothing elsewhere.

    The groups of ``whole`` there get what the stages' optimizers count in theirs. Every process must call this function.
    """
    numbered = [p for group in whole.param_groups for p in group["params"]]
    index = {id(p): i for i, p in enumerate(numbered)}
    found = {index[id(p)]: state for p, state in states_of(pipeline).items()}
    own = {i: {key: v.detach().cpu() if isinstance(v, Tensor) else v for key, v in s.items()} for i, s in found.items()}
    groups = [group for each in optimizers_of(pipeline) for group in each.param_groups]
    counted = {group[GROUP]: _changed(_settings(group), group[COPIED]) for group in groups}
    group = message_group()
    for rank in range(1, pipeline.world):
        message: list[Any] = [own, counted]
        if pipeline.rank == rank:
            dist.send_object_list(message, 0, group, torch.device("cpu"))
        elif pipeline.rank == 0:
            dist.recv_object_list(message, rank, group, torch.device("cpu"))
            own, counted = own | message[0], counted | message[1]
    for i, settings in counted.items() if pipeline.rank == 0 else ():
        whole.param_groups[i].update({key: value for key, value in settings.items() if key != "lr"})  # schedules set it
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
