"""All remedies of petra and of the examples, as one set of values."""

from typing import Literal, NamedTuple

from examples.remedies.braking import Braking
from examples.remedies.compensation import SpikeCompensation
from examples.remedies.dc_asgd import DelayCompensation
from examples.remedies.lookahead import Lookahead
from examples.remedies.shrinking import GradientShrinking
from petra import Extension
from petra.staleness import WeightPrediction, remedies


class Remedy(NamedTuple):
    """Values of remedies; see :func:`petra.staleness.remedies` and ``examples/remedies``."""

    discount: int = 0
    correction: float = 0.0
    prediction: Literal["none", "velocity", "difference"] = "none"
    horizon: float = 1.0
    compensation: bool = False
    shrink: float = 1.0
    lookahead: float = 0.0
    feedback: float = 0.0
    delay_compensation: float = 0.0
    braking: float = 0.0

    def make(self) -> tuple[Extension, ...]:
        """Return the remedies that are not off."""
        return (
            *((Braking(self.braking),) if self.braking else ()),
            *((SpikeCompensation(),) if self.compensation else ()),
            *((GradientShrinking(self.shrink),) if self.shrink < 1 else ()),
            *((Lookahead(self.lookahead),) if self.lookahead else ()),
            *((DelayCompensation(self.delay_compensation),) if self.delay_compensation else ()),
            *remedies(self.discount, self.correction, feedback=self.feedback),
            *((WeightPrediction(self.prediction, self.horizon),) if self.prediction != "none" else ()),
        )
