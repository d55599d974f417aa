"""Compiled blocks: what is compiled before the first message, and what that leaves as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from petra import Keep, Method, Pipeline
from petra.engine.options.compile import WarmUp, compile_block
from tests.support.nets import RandomSource, assert_equal, hook, mixed

SETTINGS: dict[str, dict[str, Any]] = {
    "input fetched again": {"stages": 3, "k": 2},
    "stored graphs": {"stages": 2, "method": Method("x", 2, Keep.GRAPH)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_all_is_compiled_before_the_first_message_and_no_value_changes(name: str) -> None:
    compiled: list[GraphModule] = []

    def backend(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    def run(pipeline: Pipeline) -> tuple[Any, ...]:
        source = RandomSource()
        results = [pipeline.train(source, 5).loss, pipeline.evaluate(source, 2).loss, pipeline.train(source, 3).loss]
        return pipeline.state_dict(), results, torch.get_rng_state()

    torch.manual_seed(3)
    plain, pipeline = (mixed(dropout=0.3, **SETTINGS[name]) for _ in range(2))
    for _, block in pipeline.blocks():
        compile_block(block, backend)
    before, counts = torch.get_rng_state(), list[int]()
    pipeline.hooks += [WarmUp(pipeline.plan, pipeline.stages, pipeline.device)]
    pipeline.hooks += [hook(train_begin=lambda start, stop: counts.append(len(compiled)))]
    found = run(pipeline)
    assert 0 < counts[0] == len(compiled)
    torch.set_rng_state(before)
    assert_equal(found, run(plain))
