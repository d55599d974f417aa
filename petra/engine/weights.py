"""Versions of one block's weights: which one the forward pass uses, and which one the backward pass differentiates.

=======  ===========================================  =============================================
weights  forward pass of microbatch m                 backward pass of microbatch m
=======  ===========================================  =============================================
current  the parameters, or a predicted version       the parameters, or a corrected version
stashed  the parameters, or a predicted version       the version that the forward pass used
double   the weights after u − 1 updates, where m     the version that the forward pass used
         belongs to update u (counted from 0)
=======  ===========================================  =============================================

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

    Attributes:
        predicted: Version that forward passes use until the next update. Set by a remedy, otherwise None.
        corrected: Version that backward passes differentiate until the next update. Set by a remedy, otherwise None.
        stashed: With stashed and double weights, the version that the backward pass of each microbatch in flight differentiates.
            None means the parameters; the next update replaces None by a copy of them.
        previous: The version before the last update, if forward passes may use it.
        reconstructs_with_current: Whether a reversible block reconstructs its input with the parameters even if it
            differentiates a stashed version.
    """

    reconstructs_with_current = False

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.predicted: WeightVersion | None = None
        self.corrected: WeightVersion | None = None
        self.stashed: dict[int, WeightVersion | None] = {}
        self.previous: WeightVersion | None = None

    def for_forward(self, m: int) -> WeightVersion | None:
        """Return the version that the forward pass of microbatch ``m`` uses."""
        raise NotImplementedError

    def for_backward(self, m: int) -> WeightVersion | None:
        """Return the version that the backward pass of microbatch ``m`` differentiates, and remove it from ``stashed``."""
        raise NotImplementedError

    def stash(self, m: int, version: WeightVersion | None) -> None:
        """Record that the forward pass of microbatch ``m`` used ``version``."""

    def before_update(self) -> None:
        """Copy the parameters before an optimizer step if they are still needed after it."""

    def resume(self, updates: int, previous: WeightVersion) -> None:
        """Restore the state after ``updates`` updates, with the ``previous`` version at that time, empty if there was none."""


class CurrentWeights(WeightVersions):
    """Both passes use the current parameters, unless a remedy has set predicted or corrected weights."""

    def for_forward(self, m: int) -> WeightVersion | None:
        return self.predicted

    def for_backward(self, m: int) -> WeightVersion | None:
        return self.corrected


class StashedWeights(WeightVersions):
    """The backward pass differentiates the version that the forward pass used (PipeDream, Narayanan et al. 2019).

    Args:
        keeps_graph: Whether the block stores its autograd graph. Forward passes then use a copy, because the optimizer would
            write through a graph that refers to the parameters.
    """

    reconstructs_with_current = True  # PETRA, Table 4, fourth row

    def __init__(self, parameters: Mapping[str, nn.Parameter], keeps_graph: bool) -> None:
        super().__init__(parameters)
        self._keeps_graph = keeps_graph
        self._copies: WeightVersion | None = None

    def for_forward(self, m: int) -> WeightVersion | None:
        if self.predicted is not None:
            return self.predicted
        return self._copied() if self._keeps_graph else None

    def for_backward(self, m: int) -> WeightVersion | None:
        return self.stashed.pop(m)

    def stash(self, m: int, version: WeightVersion | None) -> None:
        self.stashed[m] = version

    def resume(self, updates: int, previous: WeightVersion) -> None:
        self._copies = None

    def before_update(self) -> None:
        waiting = [m for m, version in self.stashed.items() if version is None]
        if waiting:
            self.stashed.update(dict.fromkeys(waiting, self._copied()))
        self._copies = None

    def _copied(self) -> WeightVersion:
        """Return a copy of the parameters, the same one until the next update."""
        if self._copies is None:
            self._copies = {name: p.detach().clone().requires_grad_() for name, p in self.parameters.items()}
        return self._copies


class DoubleWeights(StashedWeights):
    """Two versions serve all microbatches in flight (PipeDream-2BW, Narayanan et al. 2021).

    The microbatches of update u (counted from 0) use the weights after u − 1 updates. When a stage runs their forward passes, it
    has done either u − 1 updates and uses the parameters, or u updates and uses the previous version.

    Args:
        k: Microbatches per update.
    """

    reconstructs_with_current = False

    def __init__(self, parameters: Mapping[str, nn.Parameter], keeps_graph: bool, k: int) -> None:
        super().__init__(parameters, keeps_graph)
        self._k, self._updates = k, 0

    def for_forward(self, m: int) -> WeightVersion | None:
        if self.previous and self._updates == m // self._k:
            return self.previous
        return super().for_forward(m)

    def before_update(self) -> None:
        self.previous = self._copied()
        super().before_update()
        self._updates += 1

    def resume(self, updates: int, previous: WeightVersion) -> None:
        super().resume(updates, previous)
        self._updates, self.previous = updates, previous or None


def weight_versions(parameters: Mapping[str, nn.Parameter], weights: Weights, *, keeps_graph: bool, k: int) -> WeightVersions:
    """Return the versions for ``weights``.

    Args:
        parameters: The block's trained parameters by name.
        keeps_graph: Whether the block stores its autograd graph between its passes.
        k: Microbatches per update.
    """
    if weights is Weights.CURRENT:
        return CurrentWeights(parameters)
    if weights is Weights.STASHED:
        return StashedWeights(parameters, keeps_graph)
    return DoubleWeights(parameters, keeps_graph, k)
