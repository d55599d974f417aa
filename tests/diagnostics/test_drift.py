"""Watched reconstruction: the error against one measured from outside, warnings, and training that doesn't notice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from petra import METHODS, ConfigError, Keep, Method, Pipeline
from petra.diagnostics.reconstruction_error import DriftWatch
from petra.engine.stage import Stage
from petra.settings import Numerics
from tests.support.nets import RandomStream, mixed_net


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petra.diagnostics.reconstruction_error.EVERY", 5)


def built(method: str | Method = "petra", lr: float = 0.05, **options: object) -> Pipeline:
    def sgd(module: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(module.parameters(), lr=lr)

    return Pipeline(mixed_net(), RandomStream().spec, method=method, optimizer=sgd, seed=2, **options)  # type: ignore[arg-type]


def test_the_error_is_that_of_the_first_sample_and_training_is_the_same() -> None:
    plain, pipeline = built(), built()
    true: dict[int, tuple[Tensor, ...]] = {}
    rebuilt: dict[int, tuple[Tensor, ...]] = {}

    def spy(j: int, stage: Stage) -> None:
        forward, backward = stage.forward, stage.backward

        def noted_forward(m: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            true.update({j: tuple(t.clone() for t in x)} if m == 9 else {})
            return forward(m, x)

        def noted_backward(m: int, y: tuple[Tensor, ...], dy: tuple[Tensor, ...]) -> object:
            found = backward(m, y, dy)
            rebuilt.update({j: found[0]} if m == 9 else {})
            return found

        stage.forward, stage.backward = noted_forward, noted_backward  # type: ignore[method-assign, assignment]

    for j in (3, 4):  # each is one reversible block whose x̃ the stage before it asks for
        spy(j, pipeline.stages[j])
    watch = DriftWatch(pipeline, limit=100.0)
    with watch.watching():
        pipeline.train(RandomStream(), 12)
    plain.train(RandomStream(), 12)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, pipeline.state_dict()[key]), key
    assert watch.errors.keys() == {1, 3, 4}
    x, back = (torch.stack([t[0].flatten() for t in streams[4]]) for streams in (true, rebuilt))
    assert watch.errors[4] == pytest.approx(float((back - x).norm() / x.norm()), rel=1e-12)
    assert watch.errors[4] > 1e-4
    assert not any(vars(runner).keys() & {"forward", "backward"} for stage in pipeline.stages.values() for runner in stage.runners)


def test_without_staleness_only_rounding_is_left() -> None:
    for method in ("reversible", Method("flushed", 1, Keep.NOTHING, flush=True)):
        pipeline = built(method, k=2)
        watch = DriftWatch(pipeline, limit=0.5)
        with watch.watching():
            pipeline.train(RandomStream(), 12)
        assert len(watch.errors) == 3
        assert all(error < 1e-12 for error in watch.errors.values())


def test_a_stage_is_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = built(lr=0.5)
    with DriftWatch(pipeline, limit=1e-3).watching():
        pipeline.train(RandomStream(), 20)
    warnings = capsys.readouterr().err.splitlines()
    assert sorted(line.split(",")[0] for line in warnings) == ["warning: stage 2", "warning: stage 4", "warning: stage 5"]
    assert all("more than trainer.drift=0.001; what helps is a smaller optim.lr, a larger k" in line for line in warnings)


def test_within_a_stage_each_chain_is_watched() -> None:
    pipeline = built(METHODS["petra"], stages=1)
    watch = DriftWatch(pipeline, limit=1.0)
    with watch.watching():
        pipeline.train(RandomStream(), 6)
        watched = [i for i, runner in enumerate(pipeline.stages[0].runners) if "forward" in vars(runner)]
    assert watched == [1, 3]


def test_what_helps_depends_on_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = built("reversible", numerics=Numerics(wire=torch.bfloat16))
    with DriftWatch(pipeline, limit=1e-9).watching():
        pipeline.train(RandomStream(), 6)
    warned = capsys.readouterr().err
    assert "what helps is trainer.wire=float32, or method.keep=input" in warned
    assert "optim.lr" not in warned


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_limits_that_are_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.drift: found .*, accepted are null or numbers > 0"):
        DriftWatch(built(), limit)
