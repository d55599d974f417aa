"""The watchdog names the step in which a run hangs, and says nothing about rounds that may take long."""

import logging
import re
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from petra.engine.options.watchdog import COMPILERS, Watchdog
from petra.training import sgd
from tests.support.nets import RandomSource, make_pipeline, mixed_net

SECONDS = 0.05


class Slow(RandomSource):
    """Calls a function before it returns the inputs of some microbatches."""

    def __init__(self, slow: dict[int, Callable[[], object]]) -> None:
        super().__init__(4, 8, dtype=torch.float32)
        self.slow = slow

    def inputs(self, m: int) -> Tensor:
        self.slow.get(m, int)()
        return super().inputs(m)


def test_a_slow_round_is_reported_unless_it_is_the_first_compiles_or_is_usual(caplog: pytest.LogCaptureFixture) -> None:
    def texts(m: int) -> list[str]:
        return [text for text in caplog.messages if f"stage 1, microbatch {m}, forward" in text]

    def until_reported() -> None:
        end = time.monotonic() + 60
        while not texts(7) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(4 * SECONDS)

    def long() -> None:
        time.sleep(3 * SECONDS)

    compiler: dict[str, Callable[[], None]] = {}
    exec(compile("def compiling(long): long()", f"/site-packages/{COMPILERS[0]}", "exec"), compiler)
    data = Slow({0: long, 2: long, 4: lambda: compiler["compiling"](long), 5: long, 7: until_reported})
    pipeline = make_pipeline(mixed_net(dtype=torch.float32), data.spec, stages=3, optimizer=sgd, learning_rate=lambda t: 0.01)
    with caplog.at_level(logging.WARNING), pipeline.hooks.attached(Watchdog(pipeline.workers, 5, SECONDS)):
        pipeline.train(data, 9)
        long()
        pipeline.evaluate(data, 6)
    (text,) = texts(7)
    assert re.match(r"rank 5, stage 1, microbatch 7, forward, round \d+: [\d.]+ s without progress, ", text)
    assert "; waits in petra/engine/endpoints.py:" in text
    assert "until_reported" in text
    assert not texts(0) + texts(4) + texts(5)


def test_a_round_that_takes_half_of_the_timeout_is_reported_however_slow_the_others_were(caplog: pytest.LogCaptureFixture) -> None:
    def until_reported() -> None:
        end = time.monotonic() + 60
        while not any("until_reported" in text for text in caplog.messages) and time.monotonic() < end:
            time.sleep(0.01)

    for slow in (
        {0: until_reported},
        {2: lambda: time.sleep(0.5), 5: until_reported},
    ):  # within the quiet rounds, and after a slow one
        caplog.clear()
        data = Slow(slow)
        pipeline = make_pipeline(mixed_net(dtype=torch.float32), data.spec, stages=3, optimizer=sgd, learning_rate=lambda t: 0.01)
        watchdog = Watchdog(pipeline.workers, 5, SECONDS, quiet=1, timeout=1.5)
        with caplog.at_level(logging.WARNING), pipeline.hooks.attached(watchdog):
            pipeline.train(data, 7)
        assert any(f"stage 1, microbatch {max(slow)}, forward" in text for text in caplog.messages if "until_reported" in text)
