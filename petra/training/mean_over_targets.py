"""Updates that are means over targets instead of means of the means of k microbatches.

A pipeline averages the gradients of the k microbatches of an update, whose losses are means over their targets. With unequal
numbers of targets, such as of padded rows, each target of a small microbatch weighs more. Here the gradient of microbatch m is
multiplied by k·n_m / Σn, where n_m is its number of targets that are not -100, and the sum is over the microbatches of its update.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor
from torch.nn import functional as F

from petra.engine.endpoints import DataSource, Loss
from petra.engine.metrics import count_targets
from petra.errors import ConfigError, invalid, is_integer, require


class MeanOverTargets:
    """Training data whose updates are means over targets. Train on it, and pass :meth:`loss` as the loss of training.

    The source reads the targets of an update before its first microbatch, so no counts travel, and every method and every stage has
    the same weights. Reported losses stay as they are. For pipelines with one replica; train from a multiple of k on.

    Args:
        source: The data. Its targets are read twice.
        k: Microbatches per update.
        mean: Mean loss over the targets that are not -100.

    Raises:
        ConfigError: If ``k`` is not an integer >= 1, or the loss is called for other targets than those read.
    """

    def __init__(self, source: DataSource, k: int, mean: Loss = F.cross_entropy) -> None:
        require(is_integer(k) and k >= 1, "k", "an integer >= 1", k)
        self._source, self._k, self._mean = source, k, mean
        self._factors = deque[tuple[int, float]]()
        self._update, self._counts = -1, list[int]()

    def inputs(self, m: int) -> Tensor:
        """Return the inputs of microbatch ``m``."""
        return self._source.inputs(m)

    def targets(self, m: int) -> Tensor:
        """Return the targets of microbatch ``m``, and store its weight for the next call of :meth:`loss`."""
        update, position = divmod(m, self._k)
        if update != self._update:
            every = range(update * self._k, (update + 1) * self._k)
            self._update, self._counts = update, [int(count_targets(self._source.targets(i))) for i in every]
        targets = self._source.targets(m)
        self._factors.append((self._counts[position], self._k * self._counts[position] / max(sum(self._counts), 1)))
        return targets

    def loss(self, *arguments: Tensor) -> Tensor:
        """Return the mean loss of (output, targets). Its gradient is weighted."""
        if not self._factors or self._factors[0][0] != int(count_targets(arguments[-1])):
            raise invalid("loss", "the targets that MeanOverTargets has read, in one replica", "others", ConfigError)
        _, factor = self._factors.popleft()
        value = self._mean(*arguments)
        return value.detach() + factor * (value - value.detach()) if torch.isfinite(value) else value
