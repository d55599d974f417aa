"""The engine against PETRA written tick by tick from Eq. 5 of the paper, in plain functions of its own."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import Keep, Method, Pipeline
from petra.reversible import Coupling, TwoFunctionCoupling
from tests.nets import RandomStream, mixed_net

LEARNING_RATE, MICROBATCHES = 0.05, 19
CUTS = {"one block a stage": [1] * 6, "several blocks a stage": [2, 1, 3], "two stages": [4, 2]}


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=1e-3)


def still(block: nn.Module, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Φ or F with batch statistics and no side effect."""
    with torch.no_grad():
        y = copy.deepcopy(block)(*x)
    return y if isinstance(y, tuple) else (y,)


def undone(block: nn.Module, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Φ⁻¹(y, θ), from the couplings' equations."""
    y1, y2 = y
    if isinstance(block, Coupling):
        return y2 - still(block.f, (y1,))[0], y1
    x2 = y2 - still(block.g, (y1,))[0]
    return y1 - still(block.f, (x2,))[0], x2


def tick_by_tick(net: list[list[nn.Module]], data: RandomStream, k: int, d: int) -> list[float]:
    """Trains the stages in place and returns the losses.

    A tick is two half ticks. Stage j (from 0) forwards microbatch m in half tick 2m + d·j, and takes it back, then maybe updates,
    in half tick 2m + d·(2(J − 1) − j) + 1. At d = 2 these are Eq. 5's ticks: F in the first half, B in the second.
    """
    stages = len(net)
    optimizers = [sgd(nn.ModuleList(blocks)) for blocks in net]
    forward: dict[tuple[int, int], tuple[Tensor, ...]] = {(0, m): (data.inputs(m),) for m in range(MICROBATCHES)}
    back: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
    held: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
    clock, losses = [0] * stages, []
    for half in range(2 * MICROBATCHES + 2 * d * stages):
        for j in range(stages):
            m, idle = divmod(half - d * j, 2)
            if not idle and 0 <= m < MICROBATCHES:
                x = forward.pop((j, m))
                for i, block in enumerate(net[j]):
                    held[j, i, m] = x  # kept for the blocks that can't be inverted, for these alone
                    x = still(block, x)
                forward[j + 1, m] = x
            m, idle = divmod(half - d * (2 * (stages - 1) - j) - 1, 2)
            if idle or not 0 <= m < MICROBATCHES:
                continue
            if j == stages - 1:
                (output,) = forward.pop((stages, m))
                output = output.requires_grad_()
                loss = F.cross_entropy(output, data.targets(m))
                losses.append(loss.item())
                (gradient,) = torch.autograd.grad(loss, output)
                y, dy = (output.detach(),), (gradient,)
            else:
                y, dy = back.pop((j, m))
            for i, block in reversed(list(enumerate(net[j]))):
                x = held.pop((j, i, m))
                if isinstance(block, Coupling | TwoFunctionCoupling):
                    x = undone(block, y)
                leaves = tuple(s.clone().requires_grad_() for s in x)
                out = block(*leaves)
                out = out if isinstance(out, tuple) else (out,)
                parameters = list(block.parameters())
                gradients = torch.autograd.grad(out, [*leaves, *parameters], dy, allow_unused=True)
                for p, g in zip(parameters, gradients[len(leaves) :], strict=True):
                    p.grad = g / k if p.grad is None else p.grad + g / k
                y, dy = x, gradients[: len(leaves)]
            if j:
                back[j - 1, m] = y, dy
            clock[j] += 1
            if clock[j] % k == 0:
                optimizers[j].step()
                optimizers[j].zero_grad()
    assert clock == [MICROBATCHES] * stages
    return losses


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
def test_engine_equals_the_tick_equations(k: int, d: int, cut: str) -> None:
    model, data = mixed_net(), RandomStream()
    method = Method("petra", d, Keep.NOTHING)
    losses: list[float] = []
    pipeline = Pipeline(model, data.spec, method=method, k=k, stages=CUTS[cut], optimizer=sgd, seed=8)
    pipeline.train(data, MICROBATCHES, on_microbatch=lambda report: losses.append(float(report[1] / report[0])))

    blocks = [model.build_block(i, 8) for i in range(len(model.blocks))]
    ends = [sum(CUTS[cut][:j]) for j in range(len(CUTS[cut]) + 1)]
    expected = tick_by_tick([blocks[a:b] for a, b in pairwise(ends)], data, k, d)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    found = pipeline.state_dict()
    for i, block in enumerate(blocks):
        for key, value in block.state_dict().items():
            name = f"{model.blocks[i].name}.{key}"
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
