"""Learning-rate discount, PipeMare's technique T1: stages with stale gradients start with a smaller learning rate.

After t microbatches, a stage with staleness s uses

    lr(t) / max(1, s)^p,    p = 1 − min(t / K, 1)

where t counts from 1, the first microbatch. So its rate rises to lr(t) over the first K microbatches. The paper has integer
delays s ≥ 1. For s < 1 its formula would raise the rate, hence max(1, s).

Source: Yang et al. 2021, PipeMare. The formula agrees with the code of Ajanthan et al. (PluralisResearch/AsyncPP), where K is 7
epochs by default and the update after step t uses t + 1 for steps from 0, as here.
"""

from __future__ import annotations

from petra.staleness.optimizers import LearningRate


def discounted(rate: LearningRate, microbatches: int, staleness: float) -> LearningRate:
    """Return ``rate`` discounted over the first ``microbatches`` (K) of a stage with this staleness."""
    base = max(1.0, staleness)

    def discounted_rate(t: int) -> float:
        divisor: float = base ** (1 - min(t / microbatches, 1))
        return rate(t) / divisor

    return discounted_rate
