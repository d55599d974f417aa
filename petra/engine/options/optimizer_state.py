"""What an optimizer keeps between updates: states of parameters, and numbers of its groups and of its own.

Optimizers of other packages may have quantized states (torchao), count steps in parameter groups (pytorch-optimizer), or train
weights that differ from those for evaluation (schedule-free optimizers: Defazio et al. 2024, arXiv 2405.15682).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from petra.engine.stage import Stage
from petra.engine.update import Part, Pending
from petra.errors import require
from petra.hooks import Hook
from petra.reversible import derive_seed
from petra.torch_private import inner_tensors
from petra.update_rules import UpdateRules

NUMBERS: dict[str, type[int | float]] = {kind.__name__: kind for kind in (bool, int, float)}
"""Types of numbers by name."""
MASTER = "master"
"""Name of float32 copies of bfloat16 weights among the states of an optimizer, which does not know them."""
Kinds = dict[str, dict[Tensor, Tensor]]
"""Tensors by kind, such as ``gradient`` or ``optimizer/momentum_buffer``, then by parameter."""


def parts_of(kind: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors of one state of a parameter, by kinds such as ``exp_avg``, ``exp_avg.codes`` and ``count.int``.

    A quantized tensor consists of several, and a number becomes one in float64. Nothing else is saved.
    """
    if (name := type(value).__name__) in NUMBERS:
        return {f"{kind}.{name}": torch.tensor(value, dtype=torch.float64)}
    if not isinstance(value, Tensor):
        return {}
    return {f"{kind}.{name}": part for name, part in inner_tensors(value).items()} or {kind: value}


def load_optimizer(optimizer: torch.optim.Optimizer, kinds: Kinds) -> None:
    """Restore an optimizer's states.

    torch converts states to the type and device of the parameter, also numbers such as NAdam's product of momenta. The optimizer
    keeps these in float32 on the CPU, and would otherwise round differently and wait for the GPU at each step.
    """
    order = [p for group in optimizer.param_groups for p in group["params"]]
    named = {kind.removeprefix("optimizer/"): tensors for kind, tensors in kinds.items() if kind.startswith("optimizer/")}
    parts = {kind.partition(".")[2] for kind in named}
    made = _zero_step(optimizer) if parts - {"", *NUMBERS} else {}
    own = {kind: tensors for kind, tensors in named.items() if "." not in kind and kind != MASTER}
    # Copies: load_state_dict keeps tensors that already have the right type and device.
    saved = [{kind: tensors[p].clone() for kind, tensors in own.items() if p in tensors} for p in order]
    packed = optimizer.state_dict()
    packed["state"] = {i: values for i, values in enumerate(saved) if values}
    optimizer.load_state_dict(packed)
    for kind, tensors in named.items():
        kind, _, part = kind.partition(".")
        for p in (p for p in order if p in tensors):
            state, value = optimizer.state[p], tensors[p]
            if part in NUMBERS:
                state[kind] = NUMBERS[part](value.item())
            elif part:
                state[kind] = made[p][kind]
                inner_tensors(state[kind])[part].copy_(value)
            elif kind != "step" and (value.dim() == 0 < p.dim() or value.dtype != p.dtype):
                state[kind] = value.to(p.device, copy=True) if value.dim() else value.clone()


def _zero_step(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Make an optimizer's states, by a step at a learning rate of zero, and return them."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return dict(optimizer.state)


def entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer, and as ``<group>/<key>`` the entries of its groups, without its states and rates."""
    found = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    for i, group in enumerate(optimizer.param_groups):
        found |= {f"{i}/{key}": value for key, value in group.items() if key not in ("params", "lr")}
    return found


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in entries(optimizer).items() if type(value).__name__ in NUMBERS}


def require_clearing(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer's ``zero_grad`` does what petra does instead of calling it. That of a wrapper may pass the call on.

    Raises:
        ConfigError: If it keeps a part of the gradients, or changes weights, states or numbers.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    before = [(t, t.detach().clone()) for t in (*parameters, *states)]
    gradients, numbers = [p.grad for p in parameters], _numbers(optimizer)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = None if gradient is None else gradient.clone()
    optimizer.zero_grad()
    kept = any(p.grad is not None and bool(p.grad.any()) for p in parameters)
    only = not kept and _numbers(optimizer) == numbers and all(torch.equal(t, old) for t, old in before)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    require(only, "optimizer", "one whose zero_grad only clears gradients: petra clears them itself", type(optimizer).__name__)


class OptimizerNumbers(Part, Hook):
    """Saves the numbers that an optimizer has changed since it was built, such as counts of steps. Settings are not saved.

    Seeds torch's generators before each step from ``seed`` and the number of updates, for optimizers that round stochastically:
    replicas and resumed runs draw the same numbers. Before the first step, and before the second, which finds states, checks a
    ``zero_grad`` that is not torch's (:func:`require_clearing`).

    Switches optimizers that have other weights in training than in evaluation. A drained pipeline has those for evaluation. They
    are computed from each other, so each drain changes the last bits of the weights.

    Raises:
        ConfigError: If the optimizer has weights of its own for evaluation, and a rule or another part acts on those for training.
    """

    _optimizer: Any

    def __init__(
        self, stage: Stage, optimizer: torch.optim.Optimizer, rules: UpdateRules, others: Sequence[Part], seed: int
    ) -> None:
        self._stage, self._optimizer, self._built, self._seed = stage, optimizer, entries(optimizer), seed
        own = getattr(optimizer.zero_grad, "__func__", None) if hasattr(optimizer, "zero_grad") else torch.optim.Optimizer.zero_grad
        self._unchecked = 0 if own is torch.optim.Optimizer.zero_grad else 2
        if hasattr(optimizer, "eval"):
            expected = f"with {type(optimizer).__name__}, which has weights of its own for evaluation"
            require(rules.average is None, "optim.average", f"null {expected}", rules.average)
            require(not others, "remedy", f"none that acts at updates {expected}", [type(part).__name__ for part in others])

    def run(self, pending: Pending) -> None:
        if self._unchecked:
            self._unchecked -= 1
            require_clearing(self._optimizer)
        torch.manual_seed(derive_seed(self._seed, pending.done))

    def numbers(self) -> dict[str, Any]:
        numbers = _numbers(self._optimizer)
        changed = {name: value for name, value in numbers.items() if name not in self._built or self._built[name] != value}
        return {f"optimizer/{type(value).__name__}/{name}": value for name, value in changed.items()}

    def load(self, numbers: Mapping[str, Any]) -> None:
        for key in (key for key in numbers if key.startswith("optimizer/")):
            kind, *group, name = key.removeprefix("optimizer/").split("/")
            place = self._optimizer.param_groups[int(group[0])] if group else vars(self._optimizer)
            place[name] = NUMBERS[kind](numbers[key])

    def train_begin(self, start: int, stop: int) -> None:
        if hasattr(self._optimizer, "eval"):
            self._optimizer.train()
            self._stage.resume(start // self._stage.gradients.k, self._stage.previous())  # forget copies of the weights before

    def train_end(self) -> None:
        if hasattr(self._optimizer, "eval"):
            self._optimizer.eval()
