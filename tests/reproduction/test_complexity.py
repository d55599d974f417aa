"""Costs by number of stages and by depth: measured, against closed forms."""

import math

import pytest
import torch
from torch import nn

from petra.reversible import Coupling
from reproduction.checkpointing import SCHEMES, measure, store_all
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
def test_stored_activations_work_and_gradients_of_each_scheme(name: str) -> None:
    found = measure(SCHEMES[name], N)
    activations, forwards = COSTS[name]
    assert found.activations == pytest.approx(activations, abs=1)
    assert found.forwards == forwards
    torch.manual_seed(1)
    blocks = [Coupling(nn.Sequential(nn.Linear(3, 3), nn.Tanh())).double() for _ in range(7)]
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    gradients = []
    for scheme in (store_all, SCHEMES[name]):
        pair = [t.clone().requires_grad_() for t in x]
        y1, y2 = scheme(blocks, (pair[0], pair[1]))
        (y1 * y2).sum().backward()
        gradients.append([t.grad for t in pair] + [p.grad for block in blocks for p in block.parameters()])
        for block in blocks:
            block.zero_grad()
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
