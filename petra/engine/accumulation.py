"""Gradients of a stage between two updates, and which parameters have any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from petra.errors import ModelError, require
from petra.reversible import Gradients
from petra.torch_private import Hook, foreach_add_, foreach_zero_, late_hooks, take_hooks


class Accumulation:
    """Gradients that the microbatches of an update add to ``.grad`` of a stage's trained parameters, as their mean.

    ``.grad`` always holds a tensor, except during an optimizer step (:meth:`hide_unused`).

    Args:
        module: Blocks of the stage.
        k: Microbatches per update.

    Attributes:
        module, k: As given.
        parameters: Trained parameters.
        on_block: Called with the position in the stage of each block whose gradients have been added; None by default.
    """

    def __init__(self, module: nn.ModuleList, k: int) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.module, self.k = module, k
        self.on_block: Callable[[int], None] | None = None
        self._used = set[nn.Parameter]()
        self._hooks: dict[nn.Parameter, list[Mapping[int, Hook]]] = {}
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.take_hooks()

    def add(self, block: int, gradients: Gradients) -> None:
        """Add 1/k of the gradients of one block, which may be none.

        Args:
            block: Position of the block in the stage.
        """
        if gradients:
            if not self._all_used():
                self._used.update(gradients)
            foreach_add_([p.grad for p in gradients], list(gradients.values()), alpha=1 / self.k)
        if self.on_block is not None:
            self.on_block(block)

    def zero(self) -> None:
        """Set the accumulated gradients to zero."""
        if self.parameters:
            foreach_zero_([p.grad for p in self.parameters])

    def take_hooks(self) -> None:
        """Take over new hooks of the parameters (``register_hook``), which autograd would call at each backward pass."""
        for parameter in self.parameters:
            if found := take_hooks(parameter):
                self._hooks.setdefault(parameter, []).append(found)

    @torch.no_grad()
    def call_hooks(self, scale: Tensor | None) -> None:
        """Call the hooks of ``register_hook`` with the gradients of an update. What they return replaces the gradients.

        Args:
            scale: Loss scale of the accumulated gradients. Hooks receive them without it.

        Raises:
            ModelError: If a hook returns anything but None or a gradient.
        """
        for parameter, taken in self._hooks.items():
            if parameter not in self._used:
                continue
            assert parameter.grad is not None
            gradient = parameter.grad if scale is None else parameter.grad / scale
            for hook in [hook for hooks in taken for hook in hooks.values()]:
                result = hook(gradient)
                if result is not None:
                    fits = isinstance(result, Tensor) and result.shape == gradient.shape
                    got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
                    expected = f"None or a gradient of shape {list(gradient.shape)}"
                    require(fits, f"hook of parameter {self._name(parameter)}", expected, got, ModelError)
                    gradient = result
            parameter.grad.copy_(gradient if scale is None else gradient * scale)

    @torch.no_grad()
    def call_late_hooks(self) -> None:
        """Call the hooks of ``register_post_accumulate_grad_hook``, before an optimizer step. They may set ``.grad`` to None."""
        for parameter in self.parameters:
            for hook in late_hooks(parameter) if parameter.grad is not None else ():
                hook(parameter)

    def _name(self, parameter: nn.Parameter) -> str:
        return next(name for name, p in self.module.named_parameters() if p is parameter)

    def hide_unused(self) -> Sequence[tuple[nn.Parameter, Tensor | None]]:
        """Set ``.grad`` to None for parameters that no backward pass has reached since the last update, before an optimizer step.

        Optimizers leave these parameters as they are. Zeros would let them decay.

        Returns:
            The parameters and their zeros, and those with hooks that may replace ``.grad``, for :meth:`restart`.
        """
        hooked = [(p, p.grad) for p in self.parameters if late_hooks(p)]
        unused = [] if self._all_used() else [(p, p.grad) for p in self.parameters if p not in self._used]
        for parameter, _ in unused:
            parameter.grad = None
        return [*unused, *hooked]

    def restart(self, hidden: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
        """Set all gradients to zero after an optimizer step, including those that :meth:`hide_unused` returned."""
        for parameter, gradient in hidden:
            parameter.grad = gradient
        self._used.clear()
        self.zero()

    def used(self, device: torch.device) -> Tensor:
        """Return, in float64, 1 for each parameter that a backward pass has reached since the last update, and 0 for the others."""
        if self._all_used():
            return torch.ones(len(self.parameters), dtype=torch.float64, device=device)
        return torch.tensor([float(p in self._used) for p in self.parameters], dtype=torch.float64, device=device)

    def add_used(self, used: Tensor) -> None:
        """Include the parameters that other replicas have reached: those where ``used``, summed over replicas, is positive."""
        if not self._all_used():  # otherwise nothing can change, and the host need not wait for the device
            self._used.update(p for p, n in zip(self.parameters, used.tolist(), strict=True) if n)

    def restore_used(self) -> None:
        """Derive which parameters have been reached from gradients that a checkpoint has restored."""
        self._used = {p for p in self.parameters if p.grad is not None and bool(p.grad.any())}

    def check_trained(self, stage: int) -> None:
        """Check that the parameters that require a gradient are still the same.

        Args:
            stage: Number of the stage, from 1, for the message.

        Raises:
            ModelError: If one was frozen or unfrozen. The message names it.
        """
        trained = {id(p) for p in self.parameters}
        for name, p in self.module.named_parameters():
            was = id(p) in trained
            expected = f"requires_grad={was}, as when the pipeline was built (freeze parameters before)"
            require(was == p.requires_grad, f"parameter {name} of stage {stage}", expected, p.requires_grad, ModelError)

    def _all_used(self) -> bool:
        return len(self._used) == len(self.parameters)
