"""Optimizers of one stage.

Weight decay does not apply to one-dimensional parameters: biases and normalisation (Goyal et al. 2017, section 5.3). The learning
rate must be set before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor, nn

from petra.errors import Count, Positive, Share
from petra.torch_private import foreach_mul
from petra.training.basis_rotation import BasisRotation

NotNegative = Annotated[float, ">= 0"]
Betas = Annotated[tuple[float, float], ">= 0 and < 1"]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Rated = TypeVar("Rated", bound=torch.optim.Optimizer)


def sgd(module: nn.Module, *, momentum: Share = 0.9, nesterov: bool = True, weight_decay: NotNegative = 5e-4) -> torch.optim.SGD:
    """Return stochastic gradient descent with momentum.

    Args:
        module: Module of a stage.
        momentum: Momentum per update.
        nesterov: Whether to use Nesterov momentum.
        weight_decay: Weight decay. Biases and normalisation have none.
    """
    # fused=True takes one kernel per group instead of several per parameter, with the same results bit for bit.
    optimizer = torch.optim.SGD(
        _groups(module.parameters(), weight_decay), lr=0.0, momentum=momentum, nesterov=nesterov, fused=True
    )
    if momentum:
        # Zeros do not change the first step. If that step is skipped on the GPU, torch's own first buffer is uninitialised memory.
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return _without_rate(optimizer)


def adam(
    module: nn.Module, *, betas: Betas = (0.9, 0.999), eps: Positive = 1e-8, weight_decay: NotNegative = 0.0
) -> torch.optim.Adam:
    """Return Adam, with weight decay added to the gradient (Kingma, Ba 2015).

    Args:
        module: Module of a stage.
        betas: Decay per update of the averages of the gradient and of its square.
        eps: Added to the square root of the second average.
        weight_decay: As for SGD.
    """
    return _without_rate(torch.optim.Adam(_groups(module.parameters(), weight_decay), lr=0.0, betas=betas, eps=eps, fused=True))


def adamw(
    module: nn.Module, *, betas: Betas = (0.9, 0.999), eps: Positive = 1e-8, weight_decay: NotNegative = 0.01
) -> torch.optim.AdamW:
    """Return Adam with decoupled weight decay (Loshchilov, Hutter 2019)."""
    return _without_rate(torch.optim.AdamW(_groups(module.parameters(), weight_decay), lr=0.0, betas=betas, eps=eps, fused=True))


def nadam(
    module: nn.Module, *, betas: Betas = (0.99, 0.999), eps: Positive = 1e-8, weight_decay: NotNegative = 0.01
) -> torch.optim.NAdam:
    """Return NAdam with decoupled weight decay (Dozat 2016), as Ajanthan et al. (2025) use it for asynchronous pipelines.

    Its Nesterov momentum grows during training. The large β1 makes the look-ahead long; torch's momentum_decay is their ψ, 0.004.
    Their experiments use ``method=pipedream k=1``, or, without stashed weights, ``method=petra``.
    """
    groups = _groups(module.parameters(), weight_decay)
    return _without_rate(torch.optim.NAdam(groups, lr=0.0, betas=betas, eps=eps, decoupled_weight_decay=True, foreach=True))


def basis_rotation(
    module: nn.Module, *, betas: Betas = (0.9, 0.95), eps: Positive = 1e-8, weight_decay: NotNegative = 0.01, frequency: Count = 10
) -> BasisRotation:
    """Return Adam in a rotated basis for the weights of linear layers, and in the ordinary one for all other parameters.

    Args:
        module: Module of a stage.
        betas, eps, weight_decay: As for Adam.
        frequency: Number of updates between two updates of the basis.
    """
    matrices, rest = _matrices(module)
    groups = [{"params": matrices, "weight_decay": weight_decay, "rotated": True}] if matrices else []
    return _without_rate(BasisRotation([*groups, *_groups(rest, weight_decay)], betas=betas, eps=eps, frequency=frequency))


class Muon(torch.optim.Optimizer):
    """Muon for the weights of linear layers and AdamW for all other parameters, with one learning rate and one weight decay.

    Muon's updates are scaled to the root mean square of AdamW's (Liu et al. 2025, section 2.2), so one rate fits both. AdamW
    also gets the weights of token and position embeddings, and without ``filters`` those of convolutions.

    Args:
        module: Module of a stage.
        momentum, nesterov: Of Muon.
        betas, eps: Of AdamW, as for Adam.
        weight_decay: As for SGD.
        filters: Whether Muon also gets the weights of convolutions: each as a matrix with one row per output channel (Jordan et
            al. 2024).
    """

    # As in torch's fused optimizers, step() skips updates by `found_inf` without synchronizing with the device.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        module: nn.Module,
        *,
        momentum: Share = 0.95,
        nesterov: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: Positive = 1e-8,
        weight_decay: NotNegative = 0.01,
        filters: bool = False,
    ) -> None:
        matrices, rest = _matrices(module, filters=filters)
        self._parts: list[tuple[torch.optim.Optimizer, int]] = []
        groups: list[dict[str, Any]] = []
        if matrices:
            muon = _FilterMuon(
                matrices, lr=0.0, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
            )
            self._parts.append((muon, 1))
            groups += muon.param_groups
        if rest:
            other = torch.optim.AdamW(_groups(rest, weight_decay), lr=0.0, betas=betas, eps=eps, fused=True)
            self._parts.append((other, len(other.param_groups)))
            groups += other.param_groups
        super().__init__(groups, {})
        _without_rate(self)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step both optimizers, which share this optimizer's groups and state, also after ``load_state_dict``."""
        skip: Tensor | None = getattr(self, "found_inf", None)
        start = 0
        for part, count in self._parts:
            part.param_groups, part.state = self.param_groups[start : start + count], self.state
            if skip is None:
                part.step()
            elif isinstance(part, torch.optim.Muon):
                _step_unless(skip, part)
            else:
                part.found_inf = skip  # type: ignore[attr-defined]
                part.step()
            start += count


class _FilterMuon(torch.optim.Muon):
    """torch's Muon, which also takes filters: parameters of more than two dimensions, seen as matrices."""

    def __init__(self, parameters: list[Tensor], **options: Any) -> None:
        filters = [p for p in parameters if p.dim() > 2]
        super().__init__([{"params": [p for p in parameters if p.dim() == 2]}], **options)  # which refuses others
        self.param_groups[0]["params"] += filters

    def _init_group(self, group: Any, parameters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]) -> bool:
        """Collect parameters, gradients and momentum of a group: those of filters as views of two dimensions.

        Matrices stay as torch has them, in any memory format.
        """
        for p in group["params"]:
            if p.dim() == 2:
                continue
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            elif state["momentum_buffer"].stride() != p.stride():  # of a checkpoint
                state["momentum_buffer"] = torch.empty_like(p).copy_(state["momentum_buffer"])
        complex_ = super()._init_group(group, parameters, gradients, momenta)
        for i, p in enumerate([*parameters]):
            if p.dim() == 2:
                continue
            last = not p.is_contiguous()
            parameters[i], momenta[i] = _as_matrix(p, last), _as_matrix(momenta[i], last)
            gradients[i] = _as_matrix(gradients[i].contiguous(memory_format=_format(p)), last)
        return complex_


def _format(tensor: Tensor) -> torch.memory_format:
    """Return the memory format of filters."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


def _as_matrix(tensor: Tensor, channels_last: bool) -> Tensor:
    """Return a view of filters with one row per output channel: (channels, inputs · height · width), columns in memory's order.

    A flattened copy would lose Muon's updates, which are made in place: ``view`` refuses what is no view.
    """
    return (tensor.movedim(1, -1) if channels_last else tensor).view(len(tensor), -1)


@torch.no_grad()
def _step_unless(skip: Tensor, muon: torch.optim.Muon) -> None:
    """Step torch's Muon, which knows no ``found_inf``, and undo the step if ``skip`` is not zero."""
    parameters = [p for group in muon.param_groups for p in group["params"] if p.grad is not None]
    for p in parameters:
        if "momentum_buffer" not in muon.state[p]:
            muon.state[p]["momentum_buffer"] = torch.zeros_like(p)  # as Muon's first step does
    changed = [*parameters, *(muon.state[p]["momentum_buffer"] for p in parameters)]
    before = foreach_mul(changed, 1.0)
    muon.step()  # type: ignore[no-untyped-call]
    for tensor, old in zip(changed, before, strict=True):
        torch.where(skip > 0, old, tensor, out=tensor)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
    "muon": Muon,
    "nadam": nadam,
    "basis_rotation": basis_rotation,
}
"""Optimizers by name: functions of a stage's blocks and of settings."""


def _without_rate(optimizer: Rated) -> Rated:
    """Mark an optimizer whose learning rate must be set before each step. A pipeline without a learning rate refuses it."""
    optimizer.needs_learning_rate = True  # type: ignore[attr-defined]
    return optimizer


def _matrices(module: nn.Module, *, filters: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of linear layers and of the projections of attention layers, and all other trained parameters.

    With ``filters``, weights of convolutions are among the first.
    """
    layers = [*module.modules()]
    linear = {id(m.weight) for m in layers if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}  # GPT-2 of transformers
    projections = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    linear |= {id(m.weight) for m in layers if filters and isinstance(m, CONVOLUTIONS)}
    linear |= {id(getattr(m, name)) for m in layers if isinstance(m, nn.MultiheadAttention) for name in projections}
    linear -= {id(m.weight) for m in layers if isinstance(m, nn.Embedding)}  # shared with a linear layer
    trained = [p for p in module.parameters() if p.requires_grad]
    return [p for p in trained if id(p) in linear], [p for p in trained if id(p) not in linear]


def _groups(parameters: Iterable[Tensor], weight_decay: NotNegative) -> list[dict[str, Any]]:
    """Return the groups of the trained parameters: those with decay, and those of one dimension."""
    trained = [p for p in parameters if p.requires_grad]
    parts = ([p for p in trained if p.dim() > 1], weight_decay), ([p for p in trained if p.dim() <= 1], 0.0)
    return [{"params": params, "weight_decay": decay} for params, decay in parts if params]
