"""The emulation catches planted faults, and finds nothing wrong in the original code. Weights do not depend on random delays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.emulated import device, runs
from tests.emulated.core import core
from tests.emulated.device import Options
from tests.emulated.mutants import MUTANTS, SCENARIOS, caught
from tests.emulated.processes import run
from tests.emulated.runs import Case

CASES: tuple[tuple[Case, int], ...] = (
    (Case("petra", microbatches=8, transport="lockstep"), 3),
    (Case("petra", microbatches=8, transport="edge"), 2),
    (Case("pipedream", microbatches=8, transport="lockstep"), 2),
    (Case("1f1b", microbatches=8, transport="edge"), 3),
    (Case("petra", microbatches=8, arguments={"dp": 2, "stages": 2}), 4),
    (Case("petra", microbatches=8, numerics={"autocast": torch.bfloat16, "wire": torch.bfloat16}), 2),
)
"""Runs and their numbers of processes. Seeds are dealt to them in turns."""


def weights(case: Case, where: str | torch.device) -> dict[str, Tensor]:
    """Train, and return the weights of this process."""
    pipeline = case.pipeline(where)
    pipeline.train(case.source(), case.microbatches)
    return runs.host(pipeline.state_dict())


def expected_weights(rank: int, case: Case) -> dict[str, Tensor]:
    """Return the weights of one of several processes on the CPU."""
    return weights(case, "cpu")


def wrong_seeds(rank: int, case: Case, seeds: list[int], expected: list[dict[str, Tensor]]) -> list[int]:
    """Train with each seed of the delays. Return the seeds with which this rank's weights have other bits."""
    wrong = []
    for seed in seeds:
        device.extension.reseed(seed)
        found = weights(case, torch.device("cuda", rank))
        if not all(torch.equal(value, expected[rank][key]) for key, value in found.items()):
            wrong.append(seed)
    return wrong


def try_seeds(case: Case, world: int, seeds: list[int], expected: list[dict[str, Tensor]]) -> list[int]:
    """Return the seeds with which a rank has other bits, or all seeds if a process fails."""
    options = Options(seed=seeds[0], delay_rate=0.1, delay_us=500)
    parts: list[Any] = run(wrong_seeds, case, seeds, expected, world=world, options=options, timeout=600, group_timeout=120)
    return sorted({seed for part in parts for seed in part})


@pytest.mark.parametrize("name", core(MUTANTS, {1, 4}))
def test_planted_faults_are_caught(name: str) -> None:
    assert caught(name)


@pytest.mark.parametrize("scenario", core(SCENARIOS, ()))
def test_the_original_code_passes(scenario: str) -> None:
    assert SCENARIOS[scenario](None, 1) == ""


@pytest.mark.parametrize("block", core(range(31), {0}))
def test_weights_do_not_depend_on_delays(block: int) -> None:
    """Three hundred seeds in all, ten of them in a start of the processes."""
    case, world = CASES[block % len(CASES)]
    expected = run(expected_weights, case, world=world)
    seeds = [*range(10 * block + 1, 10 * block + 11)] if block else [1, 2, 3]
    assert try_seeds(case, world, seeds, expected) == []
