"""Cross entropy of the output layer in chunks, against the plain loss of whole logits."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import BlockSpec, ConfigError, Losses, Model, ModelError, TensorSpec
from petra.models import gpt, revgpt
from petra.models.head_loss import LinearCrossEntropy, without_logits
from tests.models.test_language import BATCH, CLASSES, LENGTH
from tests.support.nets import RandomTokens, double, make_pipeline, sgd


class SomeTargets(RandomTokens):
    """Tokens, every third of whose targets does not count."""

    def targets(self, m: int) -> Tensor:
        targets = super().targets(m).clone()
        targets[m % 3 :: 3] = -100
        return targets


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_whole_logits(own: bool, smoothing: float, bias: bool, monkeypatch) -> None:
    if own:
        monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    torch.manual_seed(0)
    targets = torch.randint(33, (50,))
    targets[::3] = -100
    tensors = [torch.randn(shape).double().requires_grad_() for shape in ((50, 8), (33, 8), *[(33,)] * bias)]
    plain = F.cross_entropy(F.linear(*tensors), targets, label_smoothing=smoothing)
    chunked = LinearCrossEntropy(smoothing, rows=7)(*tensors, targets)
    torch.testing.assert_close(chunked, plain)
    expected = torch.autograd.grad(3 * plain, tensors)
    torch.testing.assert_close(torch.autograd.grad(3 * chunked, tensors, retain_graph=True), expected)
    with pytest.raises((ModelError, RuntimeError), match=r"one backward pass|backward called twice"):
        torch.autograd.grad(3 * chunked, tensors)
    with torch.no_grad():
        torch.testing.assert_close(LinearCrossEntropy(smoothing)(*tensors, targets), plain)
    short = F.linear(*(t.bfloat16() for t in tensors)).double()
    plain = F.cross_entropy(short, targets, label_smoothing=smoothing)
    torch.testing.assert_close(LinearCrossEntropy(smoothing, dtype=torch.bfloat16)(*tensors, targets), plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("build", "settings"), [(gpt, {"method": "gpipe", "bias": False}), (revgpt, {"method": "petra"}), (gpt, {"method": "delayed"})]
)
def test_a_model_without_logits_trains_to_the_same_weights(build, settings: dict) -> None:
    """Over several stages, with stored graphs and older weights, label smoothing in training only."""
    method = settings.pop("method")
    model = double(build(classes=CLASSES, dim=12, depth=2, heads=2, size=LENGTH, **settings))
    results, data = [], SomeTargets(BATCH, LENGTH, 5)
    for own, loss in (
        (model, Losses(lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1), F.cross_entropy)),
        (without_logits(model), Losses(LinearCrossEntropy(0.1, rows=5), LinearCrossEntropy())),
    ):
        pipeline = make_pipeline(own, data.spec, method=method, k=2, stages=3, optimizer=sgd, loss=loss, metrics={})
        found = [pipeline.train(data, 6).loss, pipeline.evaluate(data, 2).loss]
        results.append((found, pipeline.state_dict()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


def test_heads_and_losses_that_do_not_fit_are_refused() -> None:
    """Before anything is trained where possible; a head that changes its logits in the first forward pass."""
    blocks = (BlockSpec("a", lambda: nn.Linear(4, 4)), BlockSpec("head", lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh())))
    model, spec = Model("mine", blocks), TensorSpec((BATCH, 4), torch.float32)
    with pytest.raises(ModelError, match="output layer of block head: expected 0, got linear"):
        without_logits(model, "linear").build(0)
    with pytest.raises(ModelError, match=r"block head: expected a block that returns the output of 0, .* got another tensor"):
        without_logits(model).build_block(1, 0)(torch.randn(2, 4))
    plain = Model("plain", (blocks[0], BlockSpec("head", lambda: nn.Linear(4, 3))))
    whole = Model("plain", (blocks[0], BlockSpec("head", lambda: nn.Sequential(nn.Linear(4, 3)))))
    with pytest.raises(ModelError, match="outputs of block head: expected 2 or 3 for loss, got 1"):
        make_pipeline(plain, spec, optimizer=sgd, loss=LinearCrossEntropy(), metrics={})
    with pytest.raises(ModelError, match="outputs of block head: expected 1 for accuracy, got 3"):
        make_pipeline(without_logits(whole), spec, optimizer=sgd, loss=LinearCrossEntropy())
    for wrong, message in ({"rows": 0}, "rows: .*>= 1, got 0"), ({"label_smoothing": 2.0}, "smoothing: .* <= 1, got 2.0"):
        with pytest.raises(ConfigError, match=message):
            LinearCrossEntropy(**wrong)
