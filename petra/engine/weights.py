"""Versions of one block's weights: which one the forward pass uses, and which one the backward pass differentiates.

=======  ===========================================  =============================================
weights  forward pass of microbatch m                 backward pass of microbatch m
=======  ===========================================  =============================================
current  the parameters, or a predicted version       the parameters, or a corrected version
stashed  the parameters, or a predicted version       the version that the forward pass used
double   the weights after u − 1 updates, where m     the version that the forward pass used
         belongs to update u (counted from 0)
=======  ===========================================  =============================================

Stashed weights are those of PipeDream (Narayanan et al. 2019), double weights those of PipeDream-2BW (Narayanan et al. 2021).
Copies are shared by all microbatches in flight: at most one is made for each version of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from petra.method import Weights

WeightVersion = dict[str, Tensor]
"""One version of a block's weights, by parameter name."""


class WeightVersions:
    """The versions of one block's weights. Methods return None where a pass uses the parameters as they are.

    Args:
        parameters: The block's trained parameters by name.
        weights: Which weights the passes use.
        keeps_graph: Whether the block stores its autograd graph. With stashed and double weights, forward passes then use a copy,
            because the optimizer would write through a graph that refers to the parameters.
        k: Microbatches per update.

    Attributes:
        predicted: Version that forward passes use until the next update. Set by a remedy, otherwise None.
        corrected: Version that backward passes differentiate until the next update. Set by a remedy, otherwise None.
        stashed: With stashed and double weights, the version that the backward pass of each microbatch in flight differentiates.
            None means the parameters; the next update replaces None by a copy of them.
        previous: With double weights, the version before the last update.
        reconstructs_with_current: Whether a reversible block reconstructs its input with the parameters even if it
            differentiates a stashed version (PETRA, Table 4, fourth row).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], weights: Weights, *, keeps_graph: bool, k: int) -> None:
        self.parameters = parameters
        self.predicted: WeightVersion | None = None
        self.corrected: WeightVersion | None = None
        self.stashed: dict[int, WeightVersion | None] = {}
        self.previous: WeightVersion | None = None
        self.reconstructs_with_current = weights is Weights.STASHED
        self._weights, self._keeps_graph, self._k, self._updates = weights, keeps_graph, k, 0
        self._copies: WeightVersion | None = None

    def for_forward(self, m: int) -> WeightVersion | None:
        """Return the version that the forward pass of microbatch ``m`` uses.

        With double weights, a stage has then done either u − 1 updates and uses the parameters, or u updates and uses the previous
        version.
        """
        if self.previous and self._updates == m // self._k:
            return self.previous
        if self.predicted is not None:
            return self.predicted
        return self._copied() if self._keeps_graph and self._weights is not Weights.CURRENT else None

    def for_backward(self, m: int) -> WeightVersion | None:
        """Return the version that the backward pass of microbatch ``m`` differentiates, and remove it from ``stashed``."""
        return self.corrected if self._weights is Weights.CURRENT else self.stashed.pop(m)

    def stash(self, m: int) -> WeightVersion | None:
        """Return the version that the forward pass of microbatch ``m`` uses, and store it if the backward pass needs it too."""
        version = self.for_forward(m)
        if self._weights is not Weights.CURRENT:
            self.stashed[m] = version
        return version

    def before_update(self) -> None:
        """Copy the parameters before an optimizer step if they are still needed after it."""
        if self._weights is Weights.DOUBLE:
            self.previous = self._copied()
        if waiting := [m for m, version in self.stashed.items() if version is None]:
            self.stashed.update(dict.fromkeys(waiting, self._copied()))
        self._copies = None
        self._updates += 1

    def resume(self, updates: int, previous: WeightVersion) -> None:
        """Restore the state after ``updates`` updates, with the ``previous`` version at that time, empty if there was none."""
        self._copies, self._updates, self.previous = None, updates, previous or None

    def _copied(self) -> WeightVersion:
        """Return a copy of the parameters, the same one until the next update."""
        if self._copies is None:
            self._copies = {name: p.detach().clone().requires_grad_() for name, p in self.parameters.items()}
        return self._copies
