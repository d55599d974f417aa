"""Settings, optimizers and state of remedies. ``tests/engine/test_ticks.py`` compares their arithmetic with the equations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from examples.remedies.fitted import FittedPrediction
from petra import UpdateRules
from petra.staleness import Correction, WeightPrediction
from petra.staleness.feedback import Feedback
from petra.staleness.prediction import velocity
from petra.training.optim import OPTIMIZERS
from petra.training.state import load_state, state_of
from tests.support.nets import RandomSource, Recorder, assert_equal, gradients, mixed, mixed_net
from tests.support.refusals import refuses
from tests.support.remedies import Remedy

test_values_out_of_range_raise = refuses(
    lambda change: Remedy(**change).make(),
    ({"discount": -1}, "discount: expected an integer >= 1, got -1"),
    ({"correction": 1.0}, "correction: expected a number >= 0 and < 1, got 1.0"),
    ({"prediction": "nonsense"}, "prediction: expected velocity or difference, got nonsense"),
    ({"correction": "0.5"}, "correction: expected a number >= 0 and < 1, got 0.5"),
)


test_remedies_that_do_not_fit_the_run_raise = refuses(
    lambda change: mixed(**change),
    ({"method": "delayed", "remedy": Remedy(correction=0.1)}, "remedy.correction: expected 0 unless .*, got 0.1"),
    ({"method": "pipedream_2bw", "k": 5, "remedy": Remedy(prediction="velocity")}, "remedy.prediction: .*=double, .* velocity"),
    ({"remedy": Remedy(delay_compensation=0.1)}, "method.weights: expected stashed or double with DelayCompensation, got current"),
    ({"method": "delayed", "remedy": Remedy(delay_compensation=0.1), "rules": UpdateRules(loss_scale=2.0)}, "precision: .* scale"),
    ({"extensions": [3]}, r"extensions: expected a list of petra.Extension, .*, got \[3\]"),
    (
        {"extensions": [Feedback(0.1), Feedback(0.2)]},
        r"extensions: expected a list of petra.Extension, such as remedies, one of a kind, got",
    ),
    (
        {"remedy": Remedy(compensation=True), "optimizer": OPTIMIZERS["adam"], "learning_rate": lambda t: 0.1},
        "optim: expected sgd with momentum > 0, which SpikeCompensation requires, got adam",
    ),
    (
        {"remedy": Remedy(prediction="velocity"), "optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.05)},
        "optim: expected adam, adamw, or sgd with momentum > 0, which remedy.prediction requires, got sgd without momentum",
    ),
)


@pytest.mark.parametrize("ratio", [1.0, 0.5, -1.0])
def test_fitted_prediction_has_the_gain_of_geometric_changes(ratio: float) -> None:
    """Changes that shrink by r each update: the next n are (r + … + r^n) times the last; a negative sum is cut off at 0."""
    weight, seen = nn.Parameter(torch.zeros(3)), []
    optimizer = torch.optim.SGD([weight], lr=1.0)
    stage = SimpleNamespace(use_in_forward=lambda predicted: seen.append(predicted[weight] - weight.detach()))
    plan = SimpleNamespace(stages=[SimpleNamespace(staleness=3.0)], layout=SimpleNamespace(tp=1))
    FittedPrediction().parts(stage, optimizer, plan, 0)
    changes = [ratio**t * torch.tensor([1.0, -2.0, 0.5]) for t in range(8)]
    for change in changes:
        weight.grad = -change
        optimizer.step()
    torch.testing.assert_close(seen[-1], max(ratio + ratio**2 + ratio**3, 0) * changes[-1])
    assert not seen[2].any(), "no gain before there are changes to fit it to"


def test_a_skipped_step_leaves_the_fitted_gain() -> None:
    weight, stage = nn.Parameter(torch.zeros(3)), SimpleNamespace(use_in_forward=lambda predicted: None)
    plan = SimpleNamespace(stages=[SimpleNamespace(staleness=3.0)], layout=SimpleNamespace(tp=1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    (part,) = FittedPrediction().parts(stage, optimizer, plan, 0)
    gains = []
    for update, skipped in enumerate([0.0] * 8 + [1.0]):
        weight.grad, optimizer.found_inf = -torch.tensor([1.0, -2.0, 0.5]) * 1.1**update, torch.tensor(skipped)  # type: ignore[attr-defined]
        optimizer.step()
        gains.append(part.gain)
    assert gains[-1] == gains[-2] > 0


def test_weights_are_derived_from_what_other_remedies_have_changed() -> None:
    """In any order of the list."""
    for derived in (Correction(0.3), WeightPrediction("difference")):
        found = []
        for extensions in ([derived, Feedback()], [Feedback(), derived]):
            pipeline = mixed(method="dsp", extensions=extensions)
            pipeline.train(RandomSource(), 12)
            found.append(pipeline.state_dict())
        assert_equal(*found)


def test_the_velocity_of_amsgrad_is_its_step() -> None:
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adam = torch.optim.Adam([p], lr=0.01, betas=(0.9, 0.9), amsgrad=True)
    for gradient in [10.0] + [0.1] * 20:
        before, p.grad = p.detach().clone(), torch.full_like(p, gradient)
        adam.step()
    torch.testing.assert_close(velocity(adam.state[p], adam.param_groups[0]), p.detach() - before)


@pytest.mark.parametrize("values", [{"feedback": 1.0}, {"correction": 0.3}, {"prediction": "difference"}], ids=str)
def test_remedies_continue_after_skipped_steps_as_if_they_had_not_been(values: dict[str, Any]) -> None:
    """The first update is skipped, as with a loss scale that is too large at first, and one between two others."""
    found, stage = [], SimpleNamespace(use_in_forward=lambda weights: None, use_in_backward=lambda weights: None)
    for updates in ([1.0, 2.0, 4.0], [None, 1.0, 2.0, None, None, 4.0]):
        p = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
        (remedy,) = Remedy(**values).make()
        (part,) = remedy.parts(stage, optimizer, SimpleNamespace(stages=[SimpleNamespace(staleness=2.0)]), 0)
        for update in updates:
            p.grad, optimizer.found_inf = torch.full((3,), update or torch.inf), torch.tensor(float(update is None))
            optimizer.step()
        found.append((p.tolist(), part.values[0].tolist()))
    assert found[0] == found[1]
    expected = -1 - (2 + 2 * 1) - (4 + 2 * 2) if "feedback" in values else -1 - 2 - 4
    assert [weights for weights, _ in found] == [[expected] * 3] * 2


@pytest.mark.parametrize("used", [[0, 0, 1, 2, 4], [0, 1, 0, 2, 4]], ids=str)
def test_feedback_leaves_out_the_updates_that_do_not_use_a_parameter(used: list[int]) -> None:
    stage, plan = SimpleNamespace(), SimpleNamespace(stages=[SimpleNamespace(staleness=2.0)])
    p, other = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = torch.optim.SGD([p, other], lr=1.0)
    Feedback(1.0).parts(stage, optimizer, plan, 0)  # type: ignore[arg-type]
    for update in used:
        p.grad, other.grad = torch.full((3,), float(update)) if update else None, torch.ones(3)
        optimizer.step()
    assert p.tolist() == [-1 - (2 + 2 * 1) - (4 + 2 * 2)] * 3


@pytest.mark.parametrize(
    ("remedy", "kind", "missing"),
    [(Remedy(prediction="difference"), "change", 0.0), (Remedy(feedback=1.0), "feedback", torch.nan)],
    ids=["change", "feedback"],
)
def test_state_resumes_on_another_partition(remedy: Remedy, kind: str, missing: float) -> None:
    """The last stage is never late and has no state. With the other partition, one of its blocks is in a late stage."""
    before, after = (mixed(remedy=remedy, k=2, stages=partition) for partition in ([4, 2], [5, 1]))
    before.train(RandomSource(), 6)
    load_state(after, state_of(before), 6, "the other partition")
    saved, loaded = ({k: v for k, v in state_of(run).items() if k.endswith(f"/{kind}")} for run in (before, after))
    assert {key.split("/")[0] for key in loaded} - {key.split("/")[0] for key in saved} == {"block3"}
    for key, value in loaded.items():
        torch.testing.assert_close(value, saved.get(key, torch.full_like(value, missing)), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", ["1f1b", "gpipe", "backprop", "pipedream_2bw", "petra"])
def test_remedies_follow_staleness_and_not_delays(method: str) -> None:
    """Gradients that are exact, or equally stale at all stages, are shrunk at no boundary."""
    found, plain = ([], [])
    for values, run in ((Remedy(shrink=0.5), found), (Remedy(), plain)):
        pipeline = mixed(remedy=values, method=method, k=5, optimizer=Recorder)
        pipeline.train(RandomSource(), 5)
        run.append(gradients(pipeline))
    ratios = {key.split(".")[0]: float(g.norm() / plain[0][key].norm()) for key, g in found[0].items() if plain[0][key].any()}
    expected = [0.5**n for n in (5, 4, 3, 2, 1, 0)] if method == "petra" else [1.0] * 6
    assert [ratios[b.name] for b in mixed_net().blocks] == pytest.approx(expected)
