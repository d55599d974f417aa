"""The emulation catches planted faults, and finds nothing wrong in the original code."""

from __future__ import annotations

import pytest

from stress import emulated_seeds as seeds
from tests.emulated.core import core
from tests.emulated.mutants import MUTANTS, SCENARIOS, caught
from tests.emulated.processes import run


@pytest.mark.parametrize("name", core(MUTANTS, {1, 4}))
def test_planted_faults_are_caught(name: str) -> None:
    assert caught(name)


@pytest.mark.parametrize("scenario", core(SCENARIOS, ()))
def test_the_original_code_passes(scenario: str) -> None:
    assert SCENARIOS[scenario](None, 1) == ""


@pytest.mark.parametrize("index", core(range(len(seeds.CASES)), {0}))
def test_weights_do_not_depend_on_delays(index: int) -> None:
    case, world = seeds.CASES[index]
    expected = run(seeds.expected_weights, case, world=world)
    assert seeds.try_seeds(case, world, [101, 102, 103], expected) == []
