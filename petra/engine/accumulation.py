"""Gradients of a stage between two updates, and which parameters have any."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from petra.errors import ModelError, require
from petra.reversible import Gradients
from petra.torch_private import foreach_add_, foreach_zero_


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
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

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

    def hide_unused(self) -> Sequence[tuple[nn.Parameter, Tensor | None]]:
        """Set ``.grad`` to None for parameters that no backward pass has reached since the last update, before an optimizer step.

        Optimizers leave these parameters as they are. Zeros would let them decay.

        Returns:
            The parameters and their zeros, for :meth:`restore_and_zero`.
        """
        unused = [] if self._all_used() else [(p, p.grad) for p in self.parameters if p not in self._used]
        for parameter, _ in unused:
            parameter.grad = None
        return unused

    def restore_and_zero(self, hidden: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
        """Set all gradients to zero after an optimizer step, including those that :meth:`hide_unused` returned."""
        for parameter, gradient in hidden:
            parameter.grad = gradient
        self._used.clear()
        self.zero()

    def is_used(self, parameter: nn.Parameter) -> bool:
        """Return whether a backward pass has reached a parameter since the last update."""
        return parameter in self._used

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
