"""Hooks on parameters: called once per update, with the accumulated gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import BlockSpec, Method, Model, ModelError, Pipeline, TensorSpec, UpdateRules
from petra.reversible import Coupling
from tests.support.nets import make_pipeline, sgd

ROWS, MICROBATCHES = 4, 12
SPEC = TensorSpec((ROWS, 6), torch.float64)


class Vectors:
    """Random vectors and classes by index."""

    def inputs(self, m: int) -> Tensor:
        return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(m), dtype=torch.float64)

    def targets(self, m: int) -> Tensor:
        return torch.randint(3, (ROWS,), generator=torch.Generator().manual_seed(1000 + m))


class Two(nn.Module):
    """Two streams from one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :3], x[:, 3:]


class Merge(nn.Module):
    """Logits of three classes from two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3).double()

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        y: Tensor = self.linear(torch.cat([x1, x2], 1))
        return y


def blocks() -> dict[str, nn.Module]:
    """Return a network whose second block is reversible."""
    torch.manual_seed(0)
    return {"stem": nn.Sequential(nn.Linear(6, 6).double(), Two()), "pair": Coupling(nn.Linear(3, 3).double()), "head": Merge()}


def train(modules: dict[str, nn.Module], **settings: Any) -> Pipeline:
    pipeline = make_pipeline(Model.of("mine", modules), SPEC, **{"optimizer": sgd, "method": "backprop", "k": 3, **settings})
    pipeline.train(Vectors(), MICROBATCHES)
    return pipeline


def plain(modules: dict[str, nn.Module], k: int = 3, clip: float | None = None, post: Any = None) -> dict[str, Tensor]:
    """Train as the pipeline does, with each update of k microbatches in one backward pass; hooks are autograd's own."""
    network = nn.ModuleDict(modules)
    optimizer = sgd(network)
    for m in range(0, MICROBATCHES, k):
        optimizer.zero_grad()
        losses = []
        for i in range(m, m + k):
            x: Any = (Vectors().inputs(i),)
            for block in modules.values():
                x = block(*x)
                x = (x,) if isinstance(x, Tensor) else x
            losses.append(F.cross_entropy(x[0], Vectors().targets(i)))
        torch.stack(losses).mean().backward()
        if clip is not None:
            for block in modules.values():
                nn.utils.clip_grad_norm_(block.parameters(), clip)
        optimizer.step()
    return dict(network.state_dict())


METHODS = ["backprop", "reversible", "1f1b"]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("method", METHODS)
def test_a_hook_replaces_the_gradient_once_per_update_as_in_plain_pytorch(method: str, clip: float | None) -> None:
    counts = {True: 0, False: 0}
    trained = []
    for pipelined in (True, False):

        def hook(gradient: Tensor, pipelined: bool = pipelined) -> Tensor:
            counts[pipelined] += 1
            return gradient.sign() * gradient.square()  # not linear: the sum over microbatches is not the sum of the results

        modules = blocks()
        for block in modules.values():
            for p in block.parameters():
                p.register_hook(hook)
        found = train(modules, method=method, rules=UpdateRules(clip=clip)).state_dict() if pipelined else plain(modules, clip=clip)
        trained.append(found)
    assert counts[True] == counts[False] == 6 * MICROBATCHES // 3
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["petra", "delayed", "pipedream_2bw"])
def test_delayed_methods_call_hooks_once_per_update(method: str) -> None:
    modules, seen = blocks(), dict[str, list[Tensor]]()
    for name, block in modules.items():
        for key, p in block.named_parameters():
            p.register_hook(seen.setdefault(f"{name}.{key}", []).append)
    train(modules, method=method, k=4)
    assert {name: len(found) for name, found in seen.items()} == dict.fromkeys(seen, MICROBATCHES // 4)


def test_a_builder_may_register_hooks() -> None:
    seen: list[Tensor] = []

    def build() -> nn.Module:
        module = nn.Linear(6, 3).double()
        module.weight.register_hook(lambda g: seen.append(g.clone()))
        module.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        return module

    model = Model("mine", (BlockSpec("head", build),))
    pipeline = make_pipeline(model, SPEC, optimizer=sgd, method="backprop", k=3)
    pipeline.train(Vectors(), 6)
    assert [tuple(g.shape) for g in seen] == [(3, 6), (3,)] * 2
    pipeline.train(Vectors(), 3)
    assert len(seen) == 6


@pytest.mark.parametrize("rules", [UpdateRules(), UpdateRules(loss_scale=1024.0), UpdateRules(clip=0.01, loss_scale=512.0)])
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
            assert all(p.grad is None for p in self.copies)
            self.own.step()
            for p, copied in self.copies.items():
                p.data.copy_(copied)

    found = [train(blocks(), optimizer=optimizer, rules=rules).state_dict() for optimizer in (sgd, Offloaded)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_hooks_that_are_methods_of_a_copied_module_belong_to_the_copy() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3, dtype=torch.float64)
            self.calls = 0
            self.weight.register_hook(self.count)

        def count(self, gradient: Tensor) -> None:
            self.calls += 1

    module = Counting()
    pipeline = train({"head": module})
    (_, copied) = next(pipeline.blocks())
    assert (copied.calls, module.calls) == (MICROBATCHES // 3, 0)


def test_removed_hooks_parameters_without_gradient_and_skipped_updates() -> None:
    module = nn.Linear(6, 3).double()
    pipeline = make_pipeline(
        Model.of("mine", {"head": module}), SPEC, optimizer=sgd, method="backprop", rules=UpdateRules(nonfinite="skip")
    )
    own = dict(pipeline.blocks())["head"]
    calls: list[str] = []
    handle = own.weight.register_hook(lambda g: calls.append("early"))  # type: ignore[union-attr, arg-type]
    pipeline.train(Vectors(), 1)
    handle.remove()
    own.weight.register_post_accumulate_grad_hook(lambda p: calls.append("late"))  # type: ignore[union-attr, arg-type]
    pipeline.train(Vectors(), 1)
    own.bias.register_hook(lambda g: g * torch.nan)  # type: ignore[union-attr, arg-type, operator]
    pipeline.train(Vectors(), 1)
    assert calls == ["early", "late"]


def test_a_hook_that_returns_another_shape_is_refused() -> None:
    modules = blocks()
    modules["head"].linear.bias.register_hook(lambda g: g.sum())  # type: ignore[union-attr, operator]
    with pytest.raises(ModelError, match=r"hook of parameter 0\.linear\.bias: expected .* of shape \[3\], got \[\]"):
        train(modules)


def test_hooks_change_nothing_of_a_run_without_them() -> None:
    modules = blocks()
    for block in modules.values():
        for p in block.parameters():
            p.register_hook(lambda g: None)
            p.register_post_accumulate_grad_hook(lambda p: None)
    method = Method("mine", 2, "nothing")  # type: ignore[arg-type]
    expected = train(blocks(), method=method).state_dict()
    torch.testing.assert_close(train(modules, method=method).state_dict(), expected, rtol=0, atol=0)
