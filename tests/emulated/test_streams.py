"""Forward beside backward and parallel stages on the emulated device: the bits of a run on one stream, whatever the delays are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from petra import Keep, Method, UpdateRules, Weights
from petra.staleness import Prediction, Remedy
from tests.emulated import runs
from tests.emulated.device import Options
from tests.emulated.processes import run
from tests.emulated.runs import Case
from tests.emulated.test_training import excess, joined

OVERLAP, PARALLEL, BOTH = {"overlap": True}, {"stage_streams": True}, {"overlap": True, "stage_streams": True}
KINDS = {"overlap": OVERLAP, "parallel": PARALLEL, "both": BOTH}
CASES: dict[str, dict[str, Any]] = {
    "petra": {},
    "revnet": {"net": "revnet18", "microbatches": 6},
    "dropout": {"net": "dropout"},
    "abn": {"net": "abn", "microbatches": 6},
    "stages": {"arguments": {"stages": [1, 2, 1, 2]}},
    "stashed": {"method": "reconstruct_stashed"},
    "graph": {"method": Method("x", 2, (*[Keep.INPUT] * 3, *[Keep.GRAPH] * 3), Weights.STASHED)},
    "mixed delays": {"method": Method("x", (3, 0, 1, 2, 2), Keep.NOTHING)},
    "adam, rules": {"optimizer": "adam", "arguments": {"rules": UpdateRules(clip=1.0, average=0.9, nonfinite="skip")}},
    "fp16": {"numerics": {"autocast": torch.float16}, "arguments": {"rules": UpdateRules(loss_scale="dynamic")}},
    "bf16": {"numerics": {"autocast": torch.bfloat16}},
    "wire": {"numerics": {"wire": torch.bfloat16, "channels_last": True}},
    "remedies": {"arguments": {"remedy": Remedy(9, 0.3, Prediction.DIFFERENCE, 1.5, True, 0.9)}},
    "global clipping": {
        "method": Method("x", 2, Keep.NOTHING, flush=True),
        "k": 13,
        "microbatches": 26,
        "arguments": {"rules": UpdateRules(clip=0.1, clip_globally=True)},
    },
}


def differences(case: Case, kinds: list[dict[str, Any]], seeds: list[int]) -> list[float]:
    """Return how much the weights of several runs differ from those on one stream, each with a seed of the delays."""
    from tests.emulated import device

    expected = runs.train(case, "cuda")
    found = []
    for runtime in kinds:
        for seed in seeds:
            device.extension.reseed(seed)
            found.append(runs.train(replace(case, runtime=runtime), "cuda").difference(expected))
    return found


@pytest.mark.parametrize("name", CASES)
def test_streams_change_no_bits(name: str) -> None:
    kinds = list(KINDS.values())
    (found,) = run(differences, Case(**CASES[name]), kinds, [1, 2], options=Options(seed=1, delay_rate=0.1), timeout=120)
    assert found == [0] * 6


@pytest.mark.parametrize(
    ("world", "transport", "runtime", "settings"),
    [
        (3, "lockstep", OVERLAP, {}),
        (3, "edge", OVERLAP, {"net": "dropout"}),
        (2, "lockstep", BOTH, {"numerics": {"wire": torch.bfloat16}}),
        (4, "lockstep", BOTH, {"arguments": {"dp": 2}}),
    ],
)
def test_streams_in_processes(world: int, transport: str, runtime: dict[str, bool], settings: dict[str, Any]) -> None:
    case = Case(transport=transport, **settings)
    expected = run(runs.train_rank, case, world=world)
    for seed in (1, 2):
        found = run(runs.train_rank, replace(case, runtime=runtime), world=world, options=Options(seed=seed, delay_rate=0.1))
        assert joined(found).difference(joined(expected)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_does_not_wait(kind: str) -> None:
    case = Case(microbatches=100, runtime=KINDS[kind])
    ((found, _),) = run(runs.synchronizations, case)
    assert excess(found, case) == {}
