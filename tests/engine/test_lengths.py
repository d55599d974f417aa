"""Sequences of several lengths: against plain autograd on cut rows, and in two processes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.remedies.lengths import Lengths
from petra import Runtime
from petra.reversible import derive_seed
from tests.engine.test_tensor_parallel import MODELS, TEXTS
from tests.support.nets import RandomTokens, assert_equal, make_pipeline, sgd, train_plainly
from tests.support.processes import run_processes
from tests.support.refusals import refuses


class Rows(RandomTokens):
    refetch = RandomTokens.inputs


class Cut(RandomTokens):
    """The same tokens and targets, with the tokens in sequences of the lengths that are drawn."""

    def inputs(self, m: int) -> Tensor:
        return super().inputs(m).reshape(-1, (4, 6, 12)[derive_seed(3, m) % 3])


def trained(rank: int, model: str = "revgpt", method: str = "petra", lengths: tuple[int, ...] = (4, 6, 12)) -> dict[str, Tensor]:
    settings = {"method": method, "k": 2, "stages": 4, "optimizer": sgd, "extensions": [Lengths(lengths, 3)]}
    pipeline = make_pipeline(MODELS[model](), TEXTS.spec, **settings, runtime=Runtime(refetch=True))
    pipeline.train(Rows(4, 12, 20), 8)
    return pipeline.state_dict()


@pytest.mark.parametrize(("model", "method"), [("gpt", "1f1b"), ("revgpt", "reversible"), ("revgpt", "backprop")])
def test_training_equals_plain_autograd_on_cut_rows(model: str, method: str) -> None:
    plain = MODELS[model]().build(0)
    train_plainly(plain, sgd(plain), Cut(4, 12, 20), 8, k=2)
    torch.testing.assert_close(trained(0, model, method), plain.state_dict(), rtol=1e-4, atol=2e-6)


@pytest.mark.processes
def test_two_processes_give_the_same_bits(tmp_path: Path) -> None:
    first, second = run_processes(2, trained, tmp_path)
    assert_equal(first | second, trained(0))


test_lengths_that_do_not_fit = refuses(
    lambda *lengths: trained(0, lengths=lengths),
    (5, 12, "remedy.lengths: expected integers > 1 that divide the largest"),
    (3, 6, "remedy.lengths: expected 12, the tokens of a row"),
)
