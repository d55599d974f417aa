"""Costs by number of stages and by depth: measured, against closed forms."""

import math

import pytest

from reproduction.checkpointing import SCHEMES, measure
from reproduction.complexity import VARIANTS
from reproduction.complexity import measure as measure_stage

J = 3
FORMS = {  # Stored graphs or inputs, versions of parameters, messages, work in forwards, for J stages.
    "backprop": ("graphs", 1, 1, (1, 1), 3),
    "reversible": ("inputs", 0, 1, (2, 4), 4),
    "delayed, graphs kept": ("graphs", 2 * J - 1, 2 * J, (1, 1), 3),
    "dsp": ("inputs", 2 * J - 1, 1, (1, 1), 4),
    "petra": ("inputs", 0, 1, (2, 4), 4),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_stage_stores_sends_and_computes_what_its_method_implies(name: str) -> None:
    unit, stored, versions, messages, work = FORMS[name]
    found = measure_stage(*VARIANTS[name], J)
    assert (getattr(found, unit), found.weights, found.flops) == pytest.approx((stored, versions, work * J))
    assert (found.forward, found.backward) == messages


N = 16
COSTS = {
    "naive": (N, 3),
    "checkpointing": (2 * math.sqrt(N), 4),
    "recursive checkpointing": (math.log2(N), 3 + math.log2(N)),
    "reversible": (1, 4),
}
"""Stored activations and work in forwards for N blocks."""


@pytest.mark.parametrize("name", SCHEMES)
def test_stored_activations_and_work_of_each_scheme(name: str) -> None:
    found = measure(SCHEMES[name], N)
    activations, forwards = COSTS[name]
    assert found.activations == pytest.approx(activations, abs=1)
    assert found.forwards == forwards
