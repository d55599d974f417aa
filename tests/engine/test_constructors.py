"""Constructors of the library refuse values of wrong kinds at once, in one line that names the argument."""

import math
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from petra import BlockSpec, Keep, Losses, Method, Numerics, Runtime, TensorSpec, UpdateRules
from petra.data import EvalSource, TrainSource, load_dataset
from petra.errors import PetraError
from petra.staleness import remedies
from petra.training import sgd
from tests.support.nets import RandomSource, make_pipeline, mixed_net

WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.5, 1e300]),
    st.sampled_from(["", "none", "nonsense", "petra", "cuda:99", "difference", "graph"]),
    st.sampled_from([(), (1,), [], ["graph"], {}, {"a": 1}, object(), nn.Linear(1, 1), nn.LazyLinear(2), torch.float16, len]),
)
NET, DATA = mixed_net(), RandomSource()
DIGITS = load_dataset("synthetic", images=8, classes=2)
ARGUMENTS: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {
    "Method": (Method, {"name": "m", "delay": 1, "keep": Keep.INPUT}),
    "remedies": (remedies, {}),
    "UpdateRules": (UpdateRules, {}),
    "Numerics": (Numerics, {}),
    "Runtime": (Runtime, {}),
    "Losses": (Losses, {"training": nn.functional.cross_entropy, "evaluation": nn.functional.cross_entropy}),
    "TensorSpec": (TensorSpec, {"shape": (2, 3), "dtype": torch.float32}),
    "BlockSpec": (BlockSpec, {"name": "b", "build": lambda: nn.Linear(1, 1)}),
    "TrainSource": (TrainSource, {"dataset": DIGITS, "batch_size": 2, "seed": 0, "augment": True, "workers": 0, "timeout": 9.0}),
    "EvalSource": (EvalSource, {"dataset": DIGITS, "batch_size": 2, "workers": 0, "timeout": 9.0}),
    "Pipeline": (make_pipeline, {"model": NET, "inputs": DATA.spec, "optimizer": sgd, "method": "petra", "k": 1, "stages": 2}),
}
"""Constructors with arguments that they accept. One argument at a time is replaced by a drawn value."""


def names_of(name: str) -> list[str]:
    build, given_ = ARGUMENTS[name]
    if name == "Pipeline":
        return [*given_, "learning_rate", "loss", "metrics", "seed", "numerics", "runtime", "rules", "extensions"]
    return list(given_) if name.endswith("Source") else list(signature(build).parameters)


@pytest.mark.parametrize("name", ARGUMENTS)
@settings(max_examples=30)
@given(data=st.data())
def test_a_drawn_argument_is_used_or_refused(name: str, data: st.DataObject) -> None:
    """Draw an argument and a value: none, booleans, numbers in and out of range, names, containers, modules, types and functions.

    A value is accepted, or refused by an error of petra in one line; any other exception fails the test. A method that is
    accepted has members of the enumerations in its fields.
    """
    build, accepted = ARGUMENTS[name]
    argument, value = data.draw(st.sampled_from(names_of(name))), data.draw(WRONG)
    made, message = None, ""
    try:
        made = build(**{**accepted, argument: value})
    except PetraError as error:
        message = str(error)
    assert "\n" not in message
    assert (made is None) == (message != "")
    if made is None:
        return
    if name == "Method":
        assert type(made.weights).__name__ == "Weights"
