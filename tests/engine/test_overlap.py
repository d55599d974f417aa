"""Forward beside backward: the same weights as in turn, bit for bit."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from petra import METHODS, BlockSpec, ConfigError, Keep, Method, Model, ModelError, Pipeline, Runtime, UpdateRules, Weights
from petra.hooks import Hook
from petra.plan.timetable import overlapped_stages
from petra.settings import Numerics
from petra.specs import Streams
from petra.staleness import Prediction
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


def assert_equal(found: tuple[dict[str, Tensor], Any], expected: tuple[dict[str, Tensor], Any]) -> None:
    assert found[1] == expected[1]
    assert found[0].keys() == expected[0].keys()
    for key, value in expected[0].items():
        assert torch.equal(found[0][key], value), key


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
    for seconds in (0.004, 0.04, 0.4):  # a loaded machine may start a thread late
        hook = Lateness(late_forwards, seconds)
        assert_equal(states(Runtime(overlap=True), hook, dropout=0.3, **CASES[name]), expected)
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


class Rebinding(nn.Module):
    """Replaces a buffer in each forward."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(4, 4), in_place
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        else:
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return self.linear(x - self.mean)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("block", "keep", "message"),
    [
        (
            lambda: Rebinding(in_place=True),
            Keep.INPUT,
            r"expected buffers that a forward pass leaves as they are.*, got a change of mean",
        ),
        (
            lambda: Rebinding(in_place=False),
            Keep.INPUT,
            r"expected buffers that a forward pass leaves as they are.*, got a change of mean",
        ),
        (Checkpointed, Keep.INPUT, "Checkpointed: activation checkpointing"),
        (Checkpointed, Keep.GRAPH, "Checkpointed: activation checkpointing"),
    ],
)
def test_blocks_that_two_threads_would_disturb_are_refused(block: Any, keep: Keep, message: str) -> None:
    from petra import TensorSpec

    class Source:
        def inputs(self, m: int) -> Tensor:
            return torch.ones(3, 4)

        def targets(self, m: int) -> Tensor:
            return torch.zeros(3, dtype=torch.int64)

    model = Model("m", (BlockSpec("a", block), BlockSpec("b", lambda: nn.Linear(4, 2))))
    method = Method("x", 2, keep, Weights.STASHED)
    pipeline = make_pipeline(
        model, TensorSpec((3, 4), torch.float32), method=method, optimizer=sgd, metrics={}, runtime=Runtime(overlap=True)
    )
    with pytest.raises(ModelError, match=message):
        pipeline.train(Source(), 6)


class Broken(Hook):
    def __init__(self, event: str) -> None:
        self.event = event

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        if self.event == "forward" and (stage, m) == (2, 9):
            raise ZeroDivisionError

    def backward_end(self, stage: int, m: int, x: Streams, dx: Streams) -> None:
        if self.event == "backward" and (stage, m) == (2, 9):
            raise ZeroDivisionError


@pytest.mark.parametrize("event", ["forward", "backward"])
def test_errors_of_both_threads_name_stage_and_microbatch(event: str) -> None:
    pipeline = built(Runtime(overlap=True))
    pipeline.hooks.attach(Broken(event))
    with pytest.raises(ZeroDivisionError) as raised:
        pipeline.train(RandomSource(), 20)
    assert raised.value.__notes__ == [f"in stage 3, microbatch 9, {event}"]
