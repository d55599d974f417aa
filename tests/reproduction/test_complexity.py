"""Costs by number of stages and by depth: measured, against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from petra.reversible import Coupling
from reproduction.checkpointing import SCHEMES, measure, store_all
from reproduction.complexity import VARIANTS
from reproduction.complexity import measure as measure_stage

FORMS = {  # Functions of J: stored graphs or inputs, versions of parameters, messages, work in forwards.
    "backprop": ("graphs", lambda J: 1, lambda J: 1, (1, 1), 3),
    "reversible": ("inputs", lambda J: 0, lambda J: 1, (2, 4), 4),
    "delayed, graphs kept": ("graphs", lambda J: 2 * J - 1, lambda J: 2 * J, (1, 1), 3),
    "dsp": ("inputs", lambda J: 2 * J - 1, lambda J: 1, (1, 1), 4),
    "petra": ("inputs", lambda J: 0, lambda J: 1, (2, 4), 4),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_stage_stores_sends_and_computes_what_its_method_implies(name: str) -> None:
    stages = 3
    unit, stored, versions, messages, work = FORMS[name]
    found = measure_stage(*VARIANTS[name], stages)
    assert getattr(found, unit) == pytest.approx(stored(stages))
    assert found.weights == pytest.approx(versions(stages))
    assert (found.forward, found.backward) == messages
    assert found.flops == pytest.approx(work * stages)


ACTIVATIONS = {
    "naive": lambda n: n,
    "checkpointing": lambda n: 2 * math.sqrt(n),
    "recursive checkpointing": lambda n: math.log2(n),
    "reversible": lambda n: 1,
}
FORWARDS = {"naive": lambda n: 3, "checkpointing": lambda n: 4, "recursive checkpointing": lambda n: 3 + math.log2(n)}


@pytest.mark.parametrize("name", SCHEMES)
def test_stored_activations_and_work_of_each_scheme(name: str) -> None:
    length = 16
    found = measure(SCHEMES[name], length)
    assert found.activations == pytest.approx(ACTIVATIONS[name](length), abs=1)
    assert found.forwards == FORWARDS.get(name, lambda n: 4)(length)


@pytest.mark.parametrize("name", SCHEMES)
def test_all_schemes_compute_the_same_gradient(name: str) -> None:
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
