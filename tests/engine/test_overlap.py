"""Forward beside backward: the same weights as in turn, bit for bit."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from petra import METHODS, ConfigError, Keep, Method, ModelError, Pipeline, Runtime, UpdateRules, Weights
from petra.hooks import Hook
from petra.plan.timetable import overlapped_stages
from petra.settings import Numerics
from petra.specs import Streams
from petra.staleness import Prediction
from tests.engine.test_any_block import Checkpointed, Vectors, chain, linear
from tests.support.nets import RandomSource, make_pipeline, mixed_net, sgd
from tests.support.remedies import Remedy


def built(runtime: Runtime, dropout: float = 0.0, **settings: Any) -> Pipeline:
    arguments: dict[str, Any] = {"k": 2, "optimizer": sgd, "seed": 4, **settings}
    return make_pipeline(mixed_net(dropout=dropout), RandomSource().spec, runtime=runtime, **arguments)


class Lateness(Hook):
    """Delays forwards or backwards by some seconds, so that the other pass of a stage overtakes."""

    def __init__(self, delays_forward: bool, seconds: float = 0.004) -> None:
        self.delays_forward, self.seconds, self.wait = delays_forward, seconds, threading.Event().wait
        self.inside: set[tuple[int, str]] = set()
        self.together: set[int] = set()

    def _enter(self, stage: int, name: str) -> None:
        self.inside.add((stage, name))
        if {(stage, "forward"), (stage, "backward")} <= self.inside:
            self.together.add(stage)
        if (name == "forward") == self.delays_forward:
            self.wait(self.seconds)

    def forward_begin(self, stage: int, m: int, x: Streams) -> None:
        self._enter(stage, "forward")

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        self.inside.discard((stage, "forward"))

    def backward_begin(self, stage: int, m: int, y: Streams, dy: Streams) -> None:
        self._enter(stage, "backward")

    def backward_end(self, stage: int, m: int, x: Streams, dx: Streams) -> None:
        self.inside.discard((stage, "backward"))


def states(runtime: Runtime, hook: Hook | None = None, **settings: Any) -> tuple[dict[str, Tensor], list[Any]]:
    pipeline, data = built(runtime, **settings), RandomSource()
    if hook is not None:
        pipeline.hooks.attach(hook)
    results = [pipeline.train(data, 15), pipeline.evaluate(data, 3), pipeline.train(data, 4)]
    return pipeline.state_dict(), results


D2 = {name: method for name, method in METHODS.items() if method.delay == 2}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in D2},
    "graph": {"method": Method("x", 2, Keep.GRAPH)},
    "graph stashed": {"method": Method("x", 3, Keep.GRAPH, Weights.STASHED)},
    "double": {"method": replace(METHODS["pipedream_2bw"], delay=2), "k": 12},
    "mixed delays": {"method": Method("x", (3, 0, 1, 2, 2), Keep.NOTHING)},
    "flush": {"method": Method("x", 2, Keep.NOTHING, flush=True), "k": 14},
    "global clipping": {
        "method": Method("x", 2, Keep.NOTHING, flush=True),
        "k": 13,
        "rules": UpdateRules(clip=0.1, clip_globally=True),
    },
    "stages": {"stages": [1, 2, 1, 2]},
    "remedies": {"remedy": Remedy(9, 0.3, Prediction.DIFFERENCE, 1.5, True, 0.9), "learning_rate": lambda t: 0.02},
    "rules": {"rules": UpdateRules(clip=0.5, average=0.9, nonfinite="skip")},
    "bf16": {"numerics": Numerics(autocast=torch.bfloat16, wire=torch.bfloat16)},
}


@pytest.mark.parametrize(("name", "late_forwards"), [("petra", False), *zip(CASES, cycle((True, False)), strict=False)])
def test_overlap_gives_the_same_bits(name: str, late_forwards: bool) -> None:
    expected = states(Runtime(), dropout=0.3, **CASES[name])
    for seconds in (0.002, 0.02, 0.2):  # a loaded machine may start a thread late
        hook = Lateness(late_forwards, seconds)
        found = states(Runtime(overlap=True), hook, dropout=0.3, **CASES[name])
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
        assert found[1] == expected[1]
        if hook.together:
            break
    assert hook.together, "no forward ran beside a backward"


@pytest.mark.parametrize("delays", [(2, 2, 2), (1, 2, 3), (0, 1)])
def test_stages_whose_next_boundary_has_two_delays_overlap(delays: tuple[int, ...]) -> None:
    assert overlapped_stages(delays) == tuple(j for j, d in enumerate(delays) if d >= 2)


@pytest.mark.parametrize(
    ("settings", "runtime", "message"),
    [
        ({"method": "1f1b"}, Runtime(overlap=True), r"overlap: expected false unless a boundary between stages has a delay d >= 2"),
        ({"stages": 1}, Runtime(overlap=True), r"overlap: .*, got true with one stage"),
        (
            {"numerics": Numerics(exact_streams=True)},
            Runtime(overlap=True),
            "exact_streams: expected false with trainer.overlap",
        ),
        ({}, Runtime(overlap=True, compile="eager"), "compile: expected null with trainer.overlap"),
    ],
)
def test_settings_that_exclude_overlap(settings: dict[str, Any], runtime: Runtime, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(runtime, **settings)


@pytest.mark.parametrize("keep", [Keep.INPUT, Keep.GRAPH])
def test_activation_checkpointing_which_two_threads_would_disturb_is_refused(keep: Keep) -> None:
    blocks, method = (Checkpointed(True), linear(), linear(6, 3)), Method("x", 2, keep, Weights.STASHED)
    blocks[0].layers.append(nn.Dropout(0.5))
    with pytest.raises(ModelError, match="Checkpointed: activation checkpointing"):
        chain(*blocks, method=method, runtime=Runtime(overlap=True)).train(Vectors(), 6)


@pytest.mark.parametrize("event", ["forward", "backward"])
def test_errors_of_both_threads_name_stage_and_microbatch(event: str) -> None:
    class Broken(Hook):
        pass

    def fails(hook: Hook, stage: int, m: int, *streams: Streams) -> None:
        if (stage, m) == (2, 9):
            raise ZeroDivisionError

    setattr(Broken, f"{event}_end", fails)
    pipeline = built(Runtime(overlap=True))
    pipeline.hooks.attach(Broken())
    with pytest.raises(ZeroDivisionError) as raised:
        pipeline.train(RandomSource(), 20)
    assert raised.value.__notes__ == [f"in stage 3, microbatch 9, {event}"]
