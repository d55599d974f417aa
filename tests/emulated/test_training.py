"""Training on the emulated device equals training on the CPU, for every method, transport and setting, whatever the delays are."""

import os
import re
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch

from petra import METHODS, UpdateRules
from tests.emulated import runs
from tests.emulated.device import Options
from tests.emulated.processes import core, run
from tests.emulated.runs import Case, joined
from tests.support.remedies import Remedy

DELAYED = Options(seed=5, delay_rate=0.05, patience_ms=240_000)


def of_method(method: str, **settings: Any) -> Case:
    """Return a short run of a method. With double-buffered weights and in PACI, an update needs many microbatches."""
    many = method in ("pipedream_2bw", "paci")
    return Case(method, **{"k": 32 if many else 2, "microbatches": 36 if many else 9, **settings})


SETTINGS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw"},
    "muon": {"optimizer": "muon"},
    "bf16": {"numerics": {"autocast": torch.bfloat16}},
    "fp16": {"numerics": {"autocast": torch.float16}, "arguments": {"rules": UpdateRules(loss_scale="dynamic")}},
    "exact": {"numerics": {"exact_streams": True}},
    "bf16 messages": {"numerics": {"message_format": "bf16"}},
    "int8": {"numerics": {"message_format": "int8"}},
    "channels_last": {"numerics": {"channels_last": True}},
    "clip and average": {"arguments": {"rules": UpdateRules(clip=1.0, average=0.999)}},
    "clip globally": {"method": "gpipe", "arguments": {"rules": UpdateRules(clip=0.1, clip_globally=True)}},
    "skip": {"arguments": {"rules": UpdateRules(nonfinite="skip")}},
    "stages": {"arguments": {"stages": 3}},
    "refetch": {"refetch": True},
    "correction": {"arguments": {"remedy": Remedy(discount=10, correction=0.135)}},
    "prediction": {"arguments": {"remedy": Remedy(prediction="difference")}},
    "velocity": {"optimizer": "adam", "arguments": {"remedy": Remedy(prediction="velocity")}},
    "compensation": {"arguments": {"remedy": Remedy(compensation=True)}},
    "lookahead": {"arguments": {"remedy": Remedy(lookahead=0.99)}},
    **{name: {"net": name, "microbatches": 4} for name in ("dropout", "revnet18", "abn", "revgpt", "revvit")},
    "resnet18": {"net": "resnet18", "method": "pipedream", "microbatches": 4},
}
ACCURACY = {**dict.fromkeys(SETTINGS, 1e-7), **dict.fromkeys(("revgpt", "revvit", "qk_norm"), 5e-6)}
"""Largest relative difference of weights. For attention, torch chooses another composition of kernels for CUDA."""


CASES = {name: of_method(name) for name in METHODS} | {name: Case(**settings) for name, settings in SETTINGS.items()}
WAYS = {"1 GPU": (1, "auto"), "2 GPUs, lockstep": (2, "lockstep"), "3 GPUs, edge": (3, "edge")}  # processes, transport


@cache
def on_cpu(name: str) -> Any:
    return run(runs.train, CASES[name], "cpu", timeout=300)[0]


def difference(name: str, way: str, options: Options = DELAYED) -> float:
    """Return how much weights on GPUs differ from those of one process on the CPU. If they are equal, losses must be, too."""
    world, transport = WAYS[way]
    target, case = runs.train_rank if world > 1 else partial(runs.train_rank, 0), replace(CASES[name], transport=transport)
    found = run(target, case, world=world, options=options, timeout=300, group_timeout=240)
    difference = joined(found).difference(on_cpu(name))
    assert difference or all(outcome.losses == on_cpu(name).losses for outcome in found)
    return difference


@pytest.mark.parametrize(("name", "way"), core(product(CASES, WAYS), range(0, 200, 11)))
def test_runs_equal_those_on_the_cpu(name: str, way: str) -> None:
    """Every eleventh here, with one seed of the delays; all with several in ``make stress``."""
    for seed in range(4 if "PETRA_STRESS" in os.environ else 1):
        options = replace(DELAYED, seed=5 + seed, delay_rate=0.05 if seed < 2 else 0.2)
        assert difference(name, way, options) <= ACCURACY.get(name, 0), f"seed {5 + seed}"


@pytest.mark.parametrize(("method", "world", "tp"), core([("petra", 4, 1), ("pipedream", 2, 1), ("petra", 4, 2)], {0, 2}))
def test_replicas_and_divided_layers(method: str, world: int, tp: int) -> None:
    """With several blocks in a stage, and an NCCL that runs the operations of all communicators one by one."""
    net, rules = ("mixed", UpdateRules(shard=method == "petra")) if tp == 1 else ("qk_norm", UpdateRules(clip=0.1))
    arguments = {"dp": 3 - tp, "stages": 3, "rules": rules}
    case = of_method(method, net=net, arguments=arguments, runtime={"tp": tp}, refetch=method == "pipedream")
    found = run(runs.train_rank, case, world=world, options=replace(DELAYED, one_slot=True))
    for own, expected in zip(found, run(runs.train_cpu_rank, case, world=world), strict=True):
        assert own.difference(expected) <= ACCURACY.get(net, 0)
    first, second = (found[::2], found[1::2]) if tp > 1 else (found[: world // 2], found[world // 2 :])
    assert joined(first).difference(joined(second)) == 0


LISTED = {  # kind and place: how often per run, per stage, per stage and update, and per microbatch
    "copy petra/engine/options/finite_check.py settle": (0, 1, 1 / 50, 0),  # outcomes once in 50 updates, and at the end
    "item petra/engine/options/finite_check.py check_drained": (0, 2, 0, 0),
    "synchronize petra/engine/options/rounds.py send": (0, 0, 0, 2),  # bounds how far the host is ahead
    "copy petra/pipeline.py _result": (1, 0, 0, 0),
    "item petra/reversible/grid.py require": (1, 0, 0, 0),
    # Checks of a pipeline's first microbatch, and of what a call of train leaves.
    "copy petra/engine/checks.py marks_of": (0, 2, 0, 0),
    "item petra/engine/checks.py <genexpr>": (8, 12, 0, 0),
    "item petra/engine/options/checked_inverse.py <genexpr>": (8, 8, 0, 0),
    "item petra/engine/options/checked_inverse.py compare": (8, 8, 0, 0),
    "item petra/engine/options/checked_inverse.py _distance": (8, 8, 0, 0),
}


def excess(found: dict[str, int], case: Case, world: int = 1) -> dict[str, int]:
    """Return the synchronizations of one of ``world`` <= 2 processes that are not listed, or happen more often than listed."""
    stages, updates = 6 // world, case.microbatches // case.k
    counts: dict[str, int] = {}
    for text, count in found.items():
        matched = re.fullmatch(r"(\S+) .* at (\S+):\d+ (\S+)", text)
        place = " ".join(matched.groups()) if matched else text
        counts[place] = counts.get(place, 0) + count
    allowed = {
        place: once + stages * (each + updates * rate) + case.microbatches * rounds
        for place, (once, each, rate, rounds) in LISTED.items()
    }
    return {place: count for place, count in counts.items() if count > allowed.get(place, 0)}


STEADY = [
    *(of_method(method, microbatches=200) for method in METHODS),
    of_method("petra", microbatches=200, refetch=True),
    Case(microbatches=200, optimizer="muon"),
    Case(microbatches=200, **SETTINGS["fp16"]),
    Case(microbatches=200, numerics={"exact_streams": True}, arguments={"rules": UpdateRules(clip=1.0, average=0.99)}),
    Case(microbatches=200, optimizer="adamw", arguments={"remedy": Remedy(prediction="difference")}),
]


@pytest.mark.parametrize("case", core(STEADY, {0, 12}), ids=lambda case: f"{case.method}-{case.optimizer}-{len(case.numerics)}")
def test_the_host_does_not_wait_in_steady_state(case: Case) -> None:
    (found,) = run(runs.synchronizations, 0, case)
    assert excess(found, case) == {}


def test_the_host_does_not_wait_in_several_processes() -> None:
    case = Case(microbatches=100)
    for found in run(runs.synchronizations, case, world=2, options=Options(seed=1)):
        assert excess(found, case, world=2) == {}
