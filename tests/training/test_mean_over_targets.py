"""Unequal numbers of targets: a mean of means by default, and a mean over targets with the wrapper of the data."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from petra import ConfigError, Losses
from petra.specs import IGNORED
from petra.training.mean_over_targets import MeanOverTargets
from tests.support.nets import RandomSource, Recorder, gradients, make_pipeline, mixed_net


class Unequal(RandomSource):
    """Microbatches with one to four targets."""

    def targets(self, m: int) -> Tensor:
        return super().targets(m).masked_fill(torch.arange(4) > m % 4, IGNORED)


@pytest.mark.parametrize("method", ["petra", "1f1b", "backprop"])
@pytest.mark.parametrize("k", [1, 3])
def test_an_update_is_the_gradient_of_the_mean_over_its_targets(method: str, k: int) -> None:
    data = MeanOverTargets(Unequal(), k)
    settings = {"loss": Losses(data.loss, F.cross_entropy), "optimizer": Recorder, "method": method, "k": k, "seed": 3}
    pipeline, plain = make_pipeline(mixed_net(), Unequal().spec, **settings), mixed_net().build(3)
    found = pipeline.train(data, k)
    total = sum(F.cross_entropy(plain(data.inputs(m)), Unequal().targets(m), reduction="sum") for m in range(k))
    mean = total / sum(m % 4 + 1 for m in range(k))
    mean.backward()
    torch.testing.assert_close(gradients(pipeline), {key: p.grad for key, p in plain.named_parameters()}, rtol=1e-9, atol=1e-12)
    assert found.loss == pytest.approx(mean.item(), rel=1e-12)


def test_targets_that_were_not_read_are_refused() -> None:
    data = MeanOverTargets(Unequal(), 2)
    with pytest.raises(ConfigError, match=r"^loss: expected the targets that MeanOverTargets has read, in one replica, got others"):
        data.loss(torch.zeros(4, 5), Unequal().targets(0))
