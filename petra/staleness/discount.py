"""Learning-rate discount, PipeMare's technique T1: stages with stale gradients start with a smaller learning rate.

After t microbatches, a stage with staleness s uses

    lr(t) / max(1, s)^p,    p = 1 − min(t / K, 1)

where t counts from 1, the first microbatch. So its rate rises to lr(t) over the first K microbatches. The paper has integer
delays s ≥ 1. For s < 1 its formula would raise the rate, hence max(1, s).

Source: Yang et al. 2021, PipeMare. The formula agrees with the code of Ajanthan et al. (PluralisResearch/AsyncPP), where K is 7
epochs by default and the update after step t uses t + 1 for steps from 0, as here.
"""

from __future__ import annotations

from dataclasses import dataclass

from petra.engine.update import LearningRate
from petra.errors import Count, require
from petra.method import Method
from petra.staleness.step import Checked
from petra.update_rules import UpdateRules


@dataclass(frozen=True)
class Discount(Checked):
    """Learning-rate discount (see :mod:`petra.staleness.discount`).

    Attributes:
        discount: Number of microbatches K; >= 1.

    Raises:
        ConfigError: If it is out of range or of another type.
    """

    discount: Count

    def check(self, method: Method, rules: UpdateRules, rate: LearningRate | None) -> None:
        require(rate is not None, "learning_rate", "a function with remedy.discount", None)

    def learning_rate(self, rate: LearningRate | None, staleness: float) -> LearningRate | None:
        assert rate is not None, "checked"
        run, base = rate, max(1.0, staleness)

        def discounted(t: int) -> float:
            divisor: float = base ** (1 - min(t / self.discount, 1))
            return run(t) / divisor

        return discounted
