"""ZB-H1 (Qi et al. 2024, Zero Bubble Pipeline Parallelism), a rival that is predicted and simulated. petra does not train with it.

It is 1F1B with a backward in two parts. The first computes δ and sends it. The second computes the gradients of the parameters;
stage j postpones it by τ_1 − τ_j microbatches, but not beyond the update, and so fills the time in which it would wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from petra.method import METHODS, Keep, Method


@dataclass(frozen=True)
class ZeroBubble(Method):
    """A method whose stages split their backward, for predictions only. It requires ``flush`` and excludes ``fill``."""


ZB_H1 = ZeroBubble("zb_h1", delay=1, keep=Keep.GRAPH, flush=True)
PREDICTED: dict[str, Method] = {**METHODS, ZB_H1.name: ZB_H1}
"""Methods that can be predicted and simulated, by name."""
