"""Weights are cast once per update under autocast, with the same bits as casts in every evaluation."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from petra import Keep, Numerics, Weights
from petra.engine.build import make_stage
from petra.engine.options.casts import CAST
from petra.engine.stage import Stage
from petra.reversible import Coupling
from petra.torch_private import TorchDispatchMode

K = 3


class Function(nn.Module):
    """Uses ``once`` in one product, ``twice`` in two, and ``scaled`` also outside of products. Maps (B, 6) to (B, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.scaled, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.once(x))
        x = self.twice(torch.tanh(self.twice(x)))
        return self.scaled(x) * self.scaled.weight.mean()


class CountCasts(TorchDispatchMode):
    """Counts the casts of each parameter, by name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.counts = dict.fromkeys(self.names.values(), 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is CAST and id(args[0]) in self.names:
            self.counts[self.names[id(args[0])]] += 1
        return function(*args, **(kwargs or {}))


def build(reversible: bool, keep: Keep, cast_once: bool, weights: Weights = Weights.CURRENT) -> Stage:
    torch.manual_seed(3)
    block = Coupling(Function()) if reversible else Function()
    return make_stage([block], [keep], weights=weights, k=K, first_block=1, numerics=Numerics(torch.bfloat16), cast_once=cast_once)


def train(stage: Stage, updates: int, streams: int) -> list[Tensor]:
    """Train with one microbatch between F and B; return outputs, gradients and weights."""
    generator, found, outputs = torch.Generator().manual_seed(5), [], {}
    optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.5)
    for m in range(updates * K + 1):
        if m < updates * K:
            outputs[m] = stage.forward(m, tuple(torch.randn(4, 6, generator=generator) for _ in range(streams)))
        if m == 0:
            continue
        deltas = tuple(torch.randn(y.shape, generator=generator) for y in outputs[m - 1])
        x, dx = stage.backward(m - 1, outputs[m - 1], deltas)
        found += [*outputs.pop(m - 1), *x, *dx]
        if m % K == 0:
            found += [p.grad.clone() for p in stage.module.parameters() if p.grad is not None]
            with stage.updating():
                optimizer.step()
    return [*found, *(p.detach() for p in stage.module.parameters())]


CASES = [(reversible, keep) for reversible in (False, True) for keep in Keep if keep is not Keep.REFETCH]
CASES.remove((False, Keep.NOTHING))


@pytest.mark.parametrize(("reversible", "keep"), CASES)
@pytest.mark.parametrize("weights", list(Weights))
def test_bits_are_those_of_casts_in_every_evaluation(reversible: bool, keep: Keep, weights: Weights) -> None:
    runs = [train(build(reversible, keep, once, weights), 3, 1 + reversible) for once in (False, True)]
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(("reversible", "keep"), CASES)
def test_a_weight_of_one_product_is_cast_once_per_update(reversible: bool, keep: Keep) -> None:
    stage = build(reversible, keep, cast_once=True)
    train(stage, 1, 1 + reversible)  # the first evaluation finds which weights to cast
    with CountCasts(stage.module) as seen:
        train(stage, 4, 1 + reversible)
    counts = {name.removeprefix("0.").removeprefix("f."): n for name, n in seen.counts.items()}
    evaluations = 4 * K * (1 if keep is Keep.GRAPH else 2)
    assert counts["once.weight"] == counts["once.bias"] == 4
    assert counts["twice.weight"] == counts["twice.bias"] == 2 * evaluations
    assert (counts["scaled.weight"], counts["scaled.bias"]) == (evaluations, 4)
    assert counts["norm.weight"] == 0


def test_weights_written_between_updates_are_cast_again() -> None:
    stage = build(False, Keep.INPUT, cast_once=True)
    x = (torch.randn(4, 6),)
    first = stage.forward(0, x)
    assert torch.equal(stage.forward(1, x)[0], first[0])
    with torch.no_grad():
        stage.module[0].get_parameter("once.weight").mul_(2)
    expected = build(False, Keep.INPUT, cast_once=False)
    expected.module.load_state_dict(stage.module.state_dict())
    assert torch.equal(stage.forward(2, x)[0], expected.forward(2, x)[0])
    assert not torch.equal(stage.forward(3, x)[0], first[0])


def test_the_module_has_its_own_parameters_outside_of_evaluations() -> None:
    stage = build(True, Keep.NOTHING, cast_once=True)
    before = dict(stage.module.named_parameters())
    train(stage, 2, 2)
    assert all(p is before[name] for name, p in stage.module.named_parameters())
