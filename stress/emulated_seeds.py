"""Train under random delays: weights must be equal for all seeds, bit for bit. ``python -m stress.emulated_seeds 1000``"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import Tensor

from tests.emulated import device, runs
from tests.emulated.device import Options
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

BLOCK = 10
"""Seeds that one start of the processes tries."""


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


def main() -> None:
    """Try the seeds; exit with status 1 if one is wrong."""
    from stress import emulated_seeds as module  # functions of __main__ can't be sent to other processes

    parser = argparse.ArgumentParser(prog="python -m stress.emulated_seeds", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1000, help="number of seeds")
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parsed = parser.parse_args()
    start, wrong = time.monotonic(), 0
    expected = [run(module.expected_weights, case, world=world) for case, world in module.CASES]
    blocks = range(parsed.first, parsed.first + parsed.count, BLOCK)
    for number, first in enumerate(blocks):
        tried = list(range(first, min(first + BLOCK, parsed.first + parsed.count)))
        index = number % len(module.CASES)
        case, world = module.CASES[index]
        found = module.try_seeds(case, world, tried, expected[index])
        wrong += len(found)
        if found or number % 10 == 9:
            seconds = time.monotonic() - start
            print(f"seeds to {tried[-1]}: {wrong} wrong {found or ''}, {seconds:.0f} s", flush=True)
    print(f"{parsed.count} seeds, {wrong} wrong, {time.monotonic() - start:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
