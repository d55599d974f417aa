"""Losses of the shares of replicas: their gradients and values add up to those of the whole microbatch under plain autograd."""

from collections.abc import Callable
from functools import partial
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from petra import BlockSpec, Model, ModelError, TensorSpec
from petra.engine.endpoints import Losses
from petra.engine.options.replicas import Share
from petra.engine.options.shares import ShareLossPort
from petra.inplace_abn.losses import bootstrapped_cross_entropy
from petra.models.head_loss import LinearCrossEntropy
from tests.support.nets import RandomSource, double, make_pipeline, sgd, train_plainly, weights
from tests.support.processes import run_processes

CLASSES = 5
WEIGHTS = torch.tensor([0.1, 1, 3, 0.5, 0], dtype=torch.float64)
CPU = torch.device("cpu")


def normalised_by_first(output: Tensor, targets: Tensor) -> Tensor:
    """A ratio of sums whose denominator counts class 0 only, and other targets with a small weight."""
    losses = F.cross_entropy(output, targets, reduction="none")
    return losses.sum() / (0.01 + (targets == 0).double()).sum()


def hardest_half(output: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(output, targets, reduction="none")
    return losses.topk(len(losses) // 2).values.mean()


def root_mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output[:, 0], targets.double()).sqrt()


def contrastive(output: Tensor, targets: Tensor) -> Tensor:
    """Each row against all rows of the microbatch."""
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def from_probabilities(output: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy(output.sigmoid(), F.one_hot(targets, CLASSES).double(), weight=WEIGHTS + 0.5)


RATIOS: dict[str, Callable[..., Tensor]] = {
    "weights": partial(F.cross_entropy, weight=WEIGHTS),
    "weights, smoothed": partial(F.cross_entropy, weight=WEIGHTS, label_smoothing=0.2),
    "weights, summed": partial(F.cross_entropy, weight=WEIGHTS, reduction="sum"),
    "ignore_index": partial(F.cross_entropy, ignore_index=0),
    "ignore_index, smoothed": partial(F.cross_entropy, ignore_index=2, label_smoothing=0.1),
    "sum": partial(F.cross_entropy, reduction="sum"),
    "module": nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1),
    "own mean": lambda o, t: F.cross_entropy(o, t),
    "own denominator": normalised_by_first,
    "squares": lambda o, t: F.mse_loss(o[:, 0], t.double()),
    "sum over a constant": lambda o, t: F.mse_loss(o[:, 0], t.double(), reduction="sum") / 64,
    "probabilities": from_probabilities,
    "balanced classes": lambda o, t: (F.cross_entropy(o, t, reduction="none") / t.bincount()[t]).sum() / len(t.unique()),
    "margin": partial(F.multi_margin_loss, weight=WEIGHTS),
}
OTHERS = {f.__name__: f for f in (hardest_half, root_mean_square, contrastive)}


def shared(loss: Any, output: tuple[Tensor, ...], targets: Tensor, dp: int, *, training: bool = True) -> tuple[Tensor, float]:
    """Return the sum of the first output's gradients over shares, in its rows, and the loss of all shares' reports."""
    source = SimpleNamespace(targets=lambda m: targets, inputs=lambda m: output[0])
    layout: Any = SimpleNamespace(inputs=TensorSpec((len(output[0]) // dp,), torch.float64), dp=dp)
    gradients, reports = [], torch.zeros(2, dtype=torch.float64)
    for r in range(dp):
        port = ShareLossPort(CPU, Losses(loss, loss), {})
        port.start(Share(source, layout, r, range(dp)), 0, 1, training=training)
        port.send(0, ((output[0].chunk(dp)[r].clone(), *output[1:]),))
        if training:
            _, own, (report,) = port.receive(0)
            gradients.append(own[0])
        reports += report if training else port.totals
    return torch.cat(gradients) if training else torch.empty(0), float(reports[1] / reports[0].clamp(min=1))


def plain(loss: Any, output: tuple[Tensor, ...], targets: Tensor) -> tuple[Tensor, float]:
    leaf = output[0].clone().requires_grad_()
    value = loss(leaf, *output[1:], targets)
    value.backward()
    assert leaf.grad is not None
    return leaf.grad, value.item()


def outputs(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", RATIOS)
def test_shares_of_a_ratio_of_sums_add_up(name: str) -> None:
    output, targets = (outputs(12),), torch.tensor([0, 1, 2, 3, 4, 4, 4, 4, 2, 0, 1, 3])
    gradient, value = plain(RATIOS[name], output, targets)
    for dp in (2, 3):
        found, loss = shared(RATIOS[name], output, targets, dp)
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15)
        assert loss == pytest.approx(value, rel=1e-12)
        assert shared(RATIOS[name], output, targets, dp, training=False)[1] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("training", [True, False])
def test_a_loss_that_is_no_ratio_of_sums_is_refused_by_every_replica(name: str, training: bool) -> None:
    for dp in (2, 3):
        message = rf"^loss: expected a mean or sum over targets, .*with dp={dp}, got {name}, whose gradient for one target depends"
        with pytest.raises(ModelError, match=message):
            shared(OTHERS[name], (outputs(12),), torch.tensor([0, 1, 2, 3, 4, 4, 4, 4, 2, 0, 1, 3]), dp, training=training)


def test_a_loss_that_declares_to_weigh_all_targets_alike_is_checked_once() -> None:
    """The right one is evaluated for the whole microbatch at the first only, and the wrong one is refused there."""
    output, targets, sizes = (outputs(12),), torch.arange(12) % CLASSES, []

    class Declared:
        mean_over_targets = True

        def __init__(self, **settings: Any) -> None:
            self.settings = settings

        def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
            sizes.append(len(targets))
            return F.cross_entropy(output, targets, **self.settings)

    gradient, _ = plain(F.cross_entropy, output, targets)
    torch.testing.assert_close(shared(Declared(), output, targets, 2)[0], gradient, rtol=1e-12, atol=1e-15)
    sizes.clear()
    shared(Declared(), output, torch.zeros(12, dtype=torch.long), 2)  # no shares that differ
    assert sizes == [6, 6]
    with pytest.raises(ModelError, match=r"^loss: expected one without mean_over_targets, .*, got Declared, in which targets have"):
        shared(Declared(weight=WEIGHTS), output, targets, 2)


def test_losses_of_petra_count_every_target_alike() -> None:
    """Shares of the losses that declare it, with targets that are ignored, and with weights among the outputs."""
    targets = torch.tensor([0, 1, -100, 3, 4, -100, -100, 2])
    hidden, weight = outputs(8), outputs(7, 1)
    pixels, classes = torch.randn(4, CLASSES, 2, 3, dtype=torch.float64), torch.arange(24).view(4, 2, 3) % CLASSES
    classes[0, 0] = -100
    for loss, output, t in (
        (LinearCrossEntropy(0.1, rows=3), (hidden, weight), targets),
        (partial(bootstrapped_cross_entropy, fraction=0.5), (pixels,), classes),
    ):
        gradient, value = plain(loss, output, t)
        found, mean = shared(loss, output, t, 2)
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15)
        assert mean == pytest.approx(value, rel=1e-12)


@given(st.data())
def test_shares_of_any_weighted_loss_add_up(data: st.DataObject) -> None:
    """Draws replicas (2 to 4), rows of a share (1 to 3), targets of which many are of one class or ignored, class weights that may
    be 0, the ignored index, label smoothing, and the reduction."""
    dp, rows = data.draw(st.integers(2, 4), "dp"), data.draw(st.integers(1, 3), "rows")
    index = data.draw(st.sampled_from([-100, 0, 2]), "ignore_index")
    drawn = st.lists(st.sampled_from([0, 0, 1, 2, 3, 4, -100 if index == -100 else index]), min_size=dp * rows, max_size=dp * rows)
    targets = torch.tensor(data.draw(drawn, "targets"))
    each = st.one_of(st.just(0.0), st.floats(0.01, 100))
    class_weights = data.draw(st.none() | st.lists(each, min_size=CLASSES, max_size=CLASSES), "weights")
    loss = partial(
        F.cross_entropy,
        weight=None if class_weights is None else torch.tensor(class_weights, dtype=torch.float64),
        ignore_index=index,
        label_smoothing=data.draw(st.sampled_from([0.0, 0.0, 0.3]), "label_smoothing"),
        reduction=data.draw(st.sampled_from(["mean", "sum"]), "reduction"),
    )
    output = (outputs(dp * rows, data.draw(st.integers(0, 99), "seed")),)
    gradient, value = plain(loss, output, targets)
    assume(isfinite(value))
    found, mean = shared(loss, output, targets, dp)
    torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-14)
    assert mean == pytest.approx(value, rel=1e-10, abs=1e-14)


def net() -> Model:
    """Return a network without batch statistics, which each replica would compute from its own rows."""
    builds = {"stem": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh()), "head": lambda: nn.Linear(8, CLASSES)}
    return double(Model("net", tuple(BlockSpec(name, build) for name, build in builds.items())))


def train_shares(rank: int) -> dict[str, Any]:
    """Train two replicas of two stages with each loss. Return the weights of this process's stages, and the losses."""
    found = {}
    for name in ("weights", "ignore_index", "ignore_index, smoothed", "sum", "own mean"):
        loss = RATIOS[name]
        settings = {"optimizer": partial(sgd, lr=0.01), "loss": loss, "method": "1f1b"}
        pipeline = make_pipeline(net(), RandomSource().spec, k=2, stages=2, dp=2, **settings)
        result = pipeline.train(RandomSource(), 6)
        found[name] = weights(pipeline), result.loss, pipeline.evaluate(RandomSource(), 3).loss
    return found


def test_replicas_train_as_plain_autograd_does(tmp_path: Path) -> None:
    ranks = run_processes(4, train_shares, tmp_path)
    for name in ranks[0]:
        model, data = net().build(0), RandomSource()
        train_plainly(model, sgd(model, lr=0.01), data, 6, k=2, loss=RATIOS[name])
        state = {key: value for rank in ranks for key, value in rank[name][0].items()}
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=1e-12, msg=name)
        assert len({rank[name][1] for rank in ranks}) == 1
