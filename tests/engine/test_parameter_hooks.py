"""Hooks on parameters: called once per update, with the accumulated gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import Model, ModelError, Pipeline, UpdateRules
from petra.reversible import Coupling
from tests.engine.test_any_block import FLAT, Halves, Vectors, linear
from tests.support.nets import make_pipeline, sgd

K, MICROBATCHES = 3, 12


def blocks() -> dict[str, nn.Module]:
    """Return a network whose second block is reversible."""
    torch.manual_seed(0)
    return {"stem": nn.Sequential(linear(), Halves()), "pair": Coupling(linear(3, 3)), "joined": Halves(), "head": linear(6, 3)}


def train(modules: dict[str, nn.Module], **settings: Any) -> Pipeline:
    pipeline = make_pipeline(Model.of("mine", modules), FLAT, **{"optimizer": sgd, "method": "backprop", "k": K, **settings})
    pipeline.train(Vectors(), MICROBATCHES)
    return pipeline


def plain(modules: dict[str, nn.Module], clip: float | None) -> dict[str, Tensor]:
    """Train as the pipeline does, with each update of k microbatches in one backward pass; hooks are autograd's own."""
    network, data = nn.ModuleDict(modules), Vectors()
    optimizer = sgd(network)
    for m in range(0, MICROBATCHES, K):
        optimizer.zero_grad()
        joined = [modules["joined"](*modules["pair"](*modules["stem"](data.inputs(i)))) for i in range(m, m + K)]
        losses = [F.cross_entropy(modules["head"](x), data.targets(i)) for i, x in enumerate(joined, m)]
        torch.stack(losses).mean().backward()
        for block in modules.values():
            nn.utils.clip_grad_norm_(block.parameters(), float("inf") if clip is None else clip)
        optimizer.step()
    return dict(network.state_dict())


@pytest.mark.parametrize(("method", "clip"), [("backprop", None), ("reversible", 0.05), ("1f1b", None)])
def test_a_hook_replaces_the_gradient_once_per_update_as_in_plain_pytorch(method: str, clip: float | None) -> None:
    counts, trained = [0, 0], []
    for pipelined in (True, False):

        def hook(gradient: Tensor, pipelined: bool = pipelined) -> Tensor:
            counts[pipelined] += 1
            return gradient.sign() * gradient.square()  # not linear: the sum over microbatches is not the sum of the results

        modules = blocks()
        for block in modules.values():
            for p in block.parameters():
                p.register_hook(hook)
        rules = UpdateRules(clip=clip, loss_scale=clip and 64.0)  # hooks get gradients without the scale
        found = train(modules, method=method, rules=rules).state_dict() if pipelined else plain(modules, clip)
        trained.append(found)
    assert counts == [6 * MICROBATCHES // K] * 2
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rules", [UpdateRules(loss_scale=1024.0), UpdateRules(clip=0.01, loss_scale=512.0)])
def test_a_late_hook_sees_what_the_optimizer_gets(rules: UpdateRules) -> None:
    """It may also do the optimizer's work and drop the gradient, as optimizers that keep their state on the CPU do."""

    class Offloaded(torch.optim.Optimizer):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module.parameters(), {"lr": 0.2})
            self.copies = {p: nn.Parameter(p.detach().clone()) for p in module.parameters()}
            self.own = sgd(nn.ParameterList(self.copies.values()))
            for p in self.copies:
                p.register_post_accumulate_grad_hook(self.receive)

        def receive(self, p: Tensor) -> None:
            assert p.grad is not None
            self.copies[p].grad, p.grad = p.grad.clone(), None  # type: ignore[index]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.own.step()
            for p, copied in self.copies.items():
                p.data.copy_(copied)

    found = [train(blocks(), optimizer=optimizer, rules=rules).state_dict() for optimizer in (sgd, Offloaded)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_removed_hooks_skipped_updates_and_other_shapes() -> None:
    pipeline = train({"head": nn.Linear(6, 3).double()}, k=1, rules=UpdateRules(nonfinite="skip"))
    own: Any = dict(pipeline.blocks())["head"]
    calls: list[str] = []
    handle = own.weight.register_hook(lambda g: calls.append("early"))
    pipeline.train(Vectors(), 1)
    handle.remove()
    own.weight.register_post_accumulate_grad_hook(lambda p: calls.append("late"))
    pipeline.train(Vectors(), 1)
    own.bias.register_hook(lambda g: g * torch.nan)
    pipeline.train(Vectors(), 1)
    assert calls == ["early", "late"]
    own.bias.register_hook(lambda g: g.sum())
    with pytest.raises(ModelError, match=r"hook of parameter 0\.bias: expected .* of shape \[3\], got \[\]"):
        pipeline.train(Vectors(), 1)
