"""The monitor of reconstruction errors: its values, its warnings, and training that it does not change."""

from functools import partial

import pytest
import torch
from torch import Tensor

from petra import METHODS, Method, Pipeline
from petra.diagnostics.reconstruction_error import ReconstructionMonitor
from petra.settings import Numerics
from petra.specs import Streams
from tests.support.nets import RandomSource, hook, mixed
from tests.support.refusals import refuses


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petra.diagnostics.reconstruction_error.EVERY", 5)


def built(method: str | Method = "petra", lr: float = 0.05, **options: object) -> Pipeline:
    return mixed(method=method, optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=lr), seed=2, **options)


def test_error_is_measured_on_the_first_sample() -> None:
    pipeline, first = built(), dict[str, Tensor]()

    def note(name: str, stage: int, m: int, x: Streams) -> None:
        if (stage, m) == (4, 9):  # one reversible block, whose input stage 3 needs
            first[name] = torch.stack([t[0].flatten() for t in x])

    monitor = ReconstructionMonitor(pipeline, limit=100.0)
    both = hook(forward_begin=partial(note, "true"), backward_end=lambda stage, m, x, dx: note("rebuilt", stage, m, x))
    with pipeline.hooks.attached(monitor), pipeline.hooks.attached(both):
        pipeline.train(RandomSource(), 12)
    assert monitor.errors.keys() == {1, 3, 4}
    expected = float((first["rebuilt"] - first["true"]).norm() / first["true"].norm())
    assert monitor.errors[4] == pytest.approx(expected, rel=1e-12)
    assert expected > 1e-4


def test_one_warning_per_stage(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = built(lr=0.5)
    with pipeline.hooks.attached(ReconstructionMonitor(pipeline, limit=1e-3)):
        pipeline.train(RandomSource(), 20)
    warnings = caplog.messages
    assert sorted(line.split(",")[0] for line in warnings) == ["stage 2", "stage 4", "stage 5"]
    expected = "above 0.001; to reduce it, try a smaller optim.lr, a larger k or a smaller method.delay"
    assert all(expected in line for line in warnings)


def test_each_run_of_reconstructing_blocks_is_measured_at_its_first_block() -> None:
    assert ReconstructionMonitor(built(METHODS["petra"], stages=1), limit=1.0).blocks == {1, 3}
    assert ReconstructionMonitor(built(METHODS["petra"]), limit=1.0).blocks == {1, 3, 4}
    assert ReconstructionMonitor(built(k=5))._every == 8, "at all positions in an update, not at the last alone"


def test_remedies_depend_on_the_run(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = built("reversible", numerics=Numerics(message_format="bf16"))
    with pipeline.hooks.attached(ReconstructionMonitor(pipeline, limit=1e-9)):
        pipeline.train(RandomSource(), 6)
    warned = caplog.text
    assert "to reduce it, try trainer.message_format=null, or method.keep=input" in warned
    assert "optim.lr" not in warned


test_invalid_limits = refuses(
    lambda limit: ReconstructionMonitor(built(), limit),
    *((limit, f"limit: expected a number > 0, got {limit}") for limit in (0.0, -1.0, float("nan"))),
)
