"""What a caller passes stays the caller's: petra neither writes to it nor keeps it by reference."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from petra import ConfigError, Model, ModelError, Pipeline, Recipe, TensorSpec
from petra.data import EvalSource, from_dataset
from petra.training import Trainer
from petra.training.state import load_state, state_of
from tests.support.nets import RandomSource, make_pipeline, mixed, mixed_net, sgd, weights

RATES = (0.1, 0.01)


def trained(microbatches: int = 8, **settings: object) -> Pipeline:
    """Return a pipeline of four stages that has trained."""
    pipeline = mixed(stages=4, k=2, **settings)
    pipeline.train(RandomSource(), microbatches)
    return pipeline


def assert_equal(found: Pipeline, expected: Pipeline) -> None:
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=0)


@pytest.mark.parametrize("capturable", [False, True])
def test_tensors_of_a_schedule_are_read_and_not_written(capturable: bool) -> None:
    """Entries of a table of tensors as learning rates give the weights of the same numbers, for optimizers with either kind."""
    table = [torch.tensor(rate, dtype=torch.float64) for rate in RATES]
    optimizer = (
        (lambda module: torch.optim.SGD(module.parameters(), lr=torch.tensor(0.5, dtype=torch.float64))) if capturable else sgd
    )
    found = trained(optimizer=optimizer, learning_rate=lambda t: table[t // 2 % 2])
    expected = trained(optimizer=optimizer, learning_rate=lambda t: RATES[t // 2 % 2])
    assert [float(t) for t in table] == list(RATES)
    assert_equal(found, expected)
    assert not any(group["lr"] is t for w in found.workers.values() for group in w.update.optimizer.param_groups for t in table)


KINDS: dict[str, Callable[[float], object]] = {
    "number": float,
    "float64": lambda rate: torch.tensor(rate, dtype=torch.float64),
    "numpy": np.float64,
    "array": lambda rate: np.array(rate),
    "fraction": Fraction,
    "requires_grad": lambda rate: torch.tensor(rate, dtype=torch.float64, requires_grad=True),
}


@settings(max_examples=max(settings().max_examples // 20, 5))
@given(st.lists(st.floats(0, 0.2), min_size=1, max_size=3), st.sampled_from(sorted(KINDS)), st.booleans(), st.integers(1, 4))
def test_rates_of_any_type_are_read_and_not_written(rates: list[float], kind: str, capturable: bool, stages: int) -> None:
    """Draws a table of rates, the type of its entries, whether the optimizer has a tensor as rate, and the number of stages."""
    table, runs = [KINDS[kind](rate) for rate in rates], []
    for rate in (lambda t: table[t % len(rates)], lambda t: rates[t % len(rates)]):
        start = torch.tensor(0.5, dtype=torch.float64) if capturable else 0.5
        made = lambda module, lr=start: torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)  # noqa: E731
        runs.append(mixed(stages=stages, k=2, optimizer=made, learning_rate=rate))
        runs[-1].train(RandomSource(), 4)
        assert float(start) == 0.5
    assert_equal(*runs)
    assert [float(entry) for entry in table] == rates  # type: ignore[arg-type]


def test_optimizers_of_all_stages_may_be_given_one_tensor_as_learning_rate() -> None:
    """Stages update at different times. A tensor that they shared would have the rate of whichever came last."""
    shared, rates = torch.tensor(0.5, dtype=torch.float64), lambda t: 0.1 / t
    build = lambda module, lr: torch.optim.SGD(module.parameters(), lr=lr)  # noqa: E731
    found = trained(optimizer=partial(build, lr=shared), learning_rate=rates)
    assert float(shared) == 0.5
    assert [float(worker.update.optimizer.param_groups[0]["lr"]) for worker in found.workers.values()] == [rates(8)] * 4
    own = trained(optimizer=lambda module: build(module, shared.clone()), learning_rate=rates)
    assert_equal(found, own)


@pytest.mark.parametrize(
    ("rate", "got"),
    [
        (torch.tensor([0.1, 0.2]), "tensor([0.1000, 0.2000])"),
        (torch.tensor([0.1]), "tensor([0.1000])"),
        (float("inf"), "inf"),
        (torch.tensor(float("nan")), "tensor(nan)"),
        ("0.1", "'0.1'"),
    ],
)
def test_other_learning_rates_than_single_numbers_are_refused_at_the_first_update(rate: object, got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mixed(stages=1, learning_rate=lambda t: rate).train(RandomSource(), 1)
    assert str(caught.value) == f"learning_rate(1): expected a number >= 0, got {got}"


def test_records_of_a_trainer_have_numbers_as_learning_rates() -> None:
    """A tensor that the caller changes later would change the row of an epoch that has ended."""
    table = [torch.tensor(0.1), torch.tensor(0.2)]
    data = RandomSource()
    data.__dict__ |= {"batches_per_epoch": 2, "batches": 1, "unit": "images", "bytes_per_target": None}
    trainer = Trainer(mixed(learning_rate=lambda t: table[max(t // 2, 1) - 1]), data, data)
    history = trainer.fit(2)
    table[0].fill_(7)
    assert [row["learning_rate"] for row in history] == pytest.approx([0.1, 0.2])
    assert all(type(row["learning_rate"]) is float for row in history)
    history.clear()
    assert [row["epoch"] for row in trainer.fit(2)] == [1, 2]


def test_metrics_may_be_changed_after_the_recipe_was_made() -> None:
    metrics = {"ones": lambda output, targets: torch.ones(())}
    recipe = Recipe(sgd, metrics=metrics)
    pipeline = Pipeline(mixed_net(), RandomSource().spec, recipe)
    metrics["twos"] = lambda output, targets: 2 * torch.ones(())
    assert pipeline.evaluate(RandomSource(), 1).metrics == {"ones": 0.25}
    metrics.clear()
    assert pipeline.train(RandomSource(), 1).metrics == {"ones": 0.25}


def test_targets_that_a_loss_changes_in_place_are_read_anew() -> None:
    """Targets from 1 on, which the loss shifts in place: a source of petra returns the same targets in each evaluation."""
    x, y = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3 + 1
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.float64))
    pipeline = make_pipeline(
        Model.of("m", model),
        TensorSpec((3, 4), torch.float64),
        optimizer=sgd,
        metrics={},
        loss=lambda o, t: F.cross_entropy(o, t.sub_(1)),
    )
    test = EvalSource(from_dataset(list(zip(x, y, strict=True))), batch_size=3)
    with torch.no_grad():
        expected = F.cross_entropy(model(x), y - 1).item()
    for _ in range(2):
        assert pipeline.evaluate(test, 2).loss == pytest.approx(expected, rel=1e-12)
    assert torch.equal(test.targets(0), y[:3])


def test_outputs_that_a_metric_changes_in_place_are_refused() -> None:
    """The next metric would see the change, and so would a last block that reconstructs its input from its output."""

    def error(output: Tensor, targets: Tensor) -> Tensor:
        return output.sub_(1).sum()

    for call in (Pipeline.train, Pipeline.evaluate):
        with pytest.raises(ModelError, match=r"^loss and metrics: expected functions that leave the output as it is"):
            call(mixed(metrics={"error": error}), RandomSource(), 1)


@pytest.mark.parametrize("rules", ["sgd", "adam"])
def test_a_state_that_a_pipeline_loads_is_copied(rules: str) -> None:
    """Two pipelines in one process, one of which starts from the state of the other, train apart."""
    optimizer = {"sgd": sgd, "adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.01)}[rules]
    first, second = trained(4, optimizer=optimizer), mixed(stages=4, k=2, optimizer=optimizer)
    load_state(second, state_of(first), 4, "test")
    expected = mixed(stages=4, k=2, optimizer=optimizer)
    load_state(expected, {key: value.clone() for key, value in state_of(first).items()}, 4, "test")
    expected.train(RandomSource(), 4)
    first.train(RandomSource(), 4)
    second.train(RandomSource(), 4)
    assert_equal(second, expected)
