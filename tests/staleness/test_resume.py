"""Every remedy continues from a saved state as if the run had not stopped, and state that is not saved is noticed."""

import importlib
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples.remedies.braking import Braking
from examples.remedies.compensation import SpikeCompensation
from examples.remedies.dc_asgd import DelayCompensation
from examples.remedies.fitted import FittedPrediction
from examples.remedies.lengths import Lengths
from examples.remedies.lookahead import Lookahead
from examples.remedies.shrinking import GradientShrinking
from petra import Pipeline, Runtime, UpdateRules
from petra.engine.block import WrappedRunner
from petra.engine.options.extension import Extension
from petra.engine.update import Part
from petra.staleness import WeightPrediction
from petra.staleness.correction import Correction
from petra.staleness.discount import Discount
from petra.staleness.feedback import Feedback
from petra.training import unsaved
from petra.training.state import load_state, state_of
from tests.engine.test_lengths import Rows
from tests.engine.test_tensor_parallel import MODELS, TEXTS
from tests.structure import ROOT
from tests.support.nets import RandomSource, make_pipeline, mixed, sgd, weights

REMEDIES: list[tuple[Extension, dict[str, Any]]] = [
    (Braking(0.5), {}),
    (SpikeCompensation(), {}),
    (GradientShrinking(0.8), {}),
    (Lookahead(0.8), {"learning_rate": lambda t: 0.02}),
    (DelayCompensation(), {"method": "delayed"}),
    (FittedPrediction(), {}),
    (Lengths((4, 6, 12), 3), {}),
    (Discount(9), {"learning_rate": lambda t: 0.1 / t}),
    (Correction(0.3), {}),
    (WeightPrediction("velocity"), {}),
    (WeightPrediction("velocity"), {"method": "reconstruct_stashed"}),
    (WeightPrediction("difference", 2.0), {}),
    (Feedback(0.5), {}),
]
ADAM = {"optimizer": lambda module: torch.optim.Adam(module.parameters(), lr=0.01)}


def built(remedy: Extension, options: dict[str, Any], k: int = 2, stages: int = 4) -> tuple[Pipeline, Any]:
    """Return a pipeline with a remedy, and its data."""
    options = {"optimizer": sgd, "k": k, "stages": stages, "extensions": [remedy], **options}
    if isinstance(remedy, Lengths):
        return make_pipeline(MODELS["revgpt"](), TEXTS.spec, **options, runtime=Runtime(refetch=True)), Rows(4, 12, 20)
    return mixed(**options), RandomSource()


def assert_resumes(remedy: Extension, options: dict[str, Any], before: int, after: int, data: Any = None, **sizes: int) -> None:
    whole, own = built(remedy, options, **sizes)
    data = data or own
    whole.train(data, before)
    state = {key: value.clone() for key, value in state_of(whole).items()}
    whole.train(data, after)
    resumed, _ = built(remedy, options, **sizes)
    load_state(resumed, state, before, "test")
    resumed.train(data, after)
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


def test_every_shipped_remedy_is_in_the_table() -> None:
    for folder in ("examples/remedies", "petra/staleness"):
        for path in (ROOT / folder).glob("*.py"):
            if path.stem != "__init__":
                importlib.import_module(f"{folder.replace('/', '.')}.{path.stem}")
    made, kinds = {type(remedy) for remedy, _ in REMEDIES}, deque(Extension.__subclasses__())
    while kinds:
        kind = kinds.popleft()
        kinds.extend(kind.__subclasses__())
        shipped = kind.__module__.startswith(("examples.remedies.", "petra.staleness."))
        assert kind in made or not shipped or kind.__name__ == "Checked", kind


@pytest.mark.parametrize(("remedy", "options"), REMEDIES, ids=lambda each: getattr(each, "prediction", type(each).__name__))
def test_a_resumed_run_equals_an_uninterrupted_one(
    remedy: Extension, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With updates before the state was saved, an update in progress, and enough updates for each history to matter."""
    assert_resumes(remedy, options, 15, 8)
    assert not caplog.messages


def test_velocities_resume_after_a_skipped_update() -> None:
    """With the learning rate of that update, whose microbatch is not finite."""
    options = {"learning_rate": lambda t: 0.1 / t, "rules": UpdateRules(nonfinite="skip")}
    assert_resumes(WeightPrediction("velocity"), options, 6, 4, data=RandomSource(changes={5: lambda x: x * torch.inf}))


@settings(max_examples=max(settings().max_examples // 8, 5))
@given(
    st.sampled_from([i for i, (remedy, _) in enumerate(REMEDIES) if not isinstance(remedy, Lengths)]),
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(2, 4),
    st.booleans(),
)
def test_any_run_with_a_remedy_resumes(which: int, before: int, after: int, k: int, stages: int, adam: bool) -> None:
    """Draws the remedy, the microbatches before and after, k, the stages, and SGD or Adam where the remedy allows it."""
    remedy, options = REMEDIES[which]
    either = not isinstance(remedy, SpikeCompensation | Lookahead)
    assert_resumes(remedy, options | (ADAM if adam and either else {}), before, after, k=k, stages=stages)


class Norms(Part):
    """Keeps a tensor and a number that it does not save, and a number that it does."""

    def __init__(self) -> None:
        self.past, self.count, self.saved = deque[Tensor](), 0, 0

    def run(self, pending: Any) -> None:
        self.past.append(pending.squared_norm)
        self.count, self.saved = self.count + 2, self.saved + 1

    def numbers(self) -> dict[str, float]:
        return {"saved": self.saved}

    def load(self, numbers: Any) -> None:
        self.saved = int(numbers["saved"])


class Residual(WrappedRunner):
    """Keeps what it has rounded off gradients, as error feedback does."""

    residual: Tensor | None = None

    def backward(self, m: int, y: Any, dy: Any) -> Any:
        self.residual = dy[0] if self.residual is None else self.residual + dy[0]
        return self.inner.backward(m, y, dy)


@dataclass(frozen=True)
class Forgetful(Extension):
    def parts(self, *_: Any) -> list[Part]:
        return [Norms()]


@dataclass(frozen=True)
class Rounding(Extension):
    def wrap_runner(self, runner: Any) -> Any:
        return Residual(runner)


@pytest.mark.parametrize(
    ("remedy", "found"), [(Forgetful(), ["Norms keeps", "got past", "got count"]), (Rounding(), ["Residual keeps", "got residual"])]
)
def test_state_that_a_checkpoint_lacks_is_noticed_once(
    remedy: Extension, found: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    unsaved._noticed.clear()
    pipeline = mixed(extensions=[remedy])
    for _ in range(3):
        pipeline.train(RandomSource(), 2)
        state_of(pipeline)
    assert len(caplog.messages) == len(found) - 1
    for text in found:
        assert any(text in message for message in caplog.messages)
