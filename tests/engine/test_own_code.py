"""Code of users beside the passes of a block: optimizers, schedules, closures, copies. It is used, or refused in one line."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from petra import ConfigError, Keep, Method, Model, ModelError, Pipeline
from petra.reversible import Coupling
from tests.engine.test_any_block import FLAT, Halves, Vectors, linear
from tests.support.nets import assert_equal, make_pipeline, sgd, train_plainly
from tests.support.refusals import refuses

RECOMPUTE = Method("recompute", 0, Keep.INPUT)


class Function(nn.Module):
    """A linear layer and a function of the layer and the input."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.linear, self.function = linear(width, width), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x)


def with_functions(inner: nn.Module, outer: nn.Module, **settings: Any) -> Pipeline:
    """Return a pipeline with one module inside a coupling, and one as a later block."""
    blocks = {"stem": linear(6, 6), "split": Halves(), "c": Coupling(inner), "merge": Halves(), "own": outer, "head": linear(6, 3)}
    return make_pipeline(Model.of("mine", blocks), FLAT, **{"optimizer": sgd, "method": "reversible", "k": 2, **settings})


# Optimizers


class Feedback(torch.optim.SGD):
    """Keeps half of each gradient."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


class Late(torch.optim.SGD):
    """Clears gradients, and after a step shrinks the weights."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state[self.param_groups[0]["params"][0]]["done"] = torch.ones(1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for p in self.param_groups[0]["params"] if self.state else ():
            p.data.mul_(0.9)


class Passing(torch.optim.SGD):
    """A wrapper, which passes calls on."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.inner = torch.optim.SGD(self.param_groups, lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def patched(params: Any, lr: float) -> torch.optim.Optimizer:
    made = torch.optim.SGD(params, lr)
    made.zero_grad = MethodType(Feedback.zero_grad, made)  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(("kind", "updates"), [(Feedback, 0), (patched, 0), (Late, 1)])
@pytest.mark.parametrize("method", ["petra", "1f1b"])
def test_an_own_zero_grad_is_refused(kind: Callable[..., Any], updates: int, method: str) -> None:
    """Those of the first stage to update: at the first update, or at the second one, when the optimizer has states."""
    settings = {"optimizer": lambda m: kind(m.parameters(), lr=0.1), "method": method, "k": 1, "stages": 2}
    pipeline = with_functions(linear(3, 3), linear(6, 6), **settings)
    with pytest.raises(ConfigError, match=r"^optimizer: expected one whose zero_grad only clears gradients: petra clears"):
        pipeline.train(Vectors(), 6)
    assert max(worker.update.done for worker in pipeline.workers.values()) == updates + 1


def test_a_zero_grad_that_passes_the_call_on_is_accepted() -> None:
    torch.manual_seed(0)
    modules = linear(3, 3), linear(6, 6)
    found = [
        with_functions(*copy.deepcopy(modules), optimizer=lambda m, kind=kind: kind(m.parameters(), lr=0.1))
        for kind in (Passing, torch.optim.SGD)
    ]
    found[1].load_state_dict(found[0].state_dict())
    for pipeline in found:
        pipeline.train(Vectors(), 6)
    assert_equal(*[pipeline.state_dict() for pipeline in found])


# Schedules


@pytest.mark.parametrize("stages", [1, 3])
def test_a_learning_rate_that_changes_with_each_call_is_refused(stages: int) -> None:
    """Each stage calls it, so that stages would have different rates."""
    rate, numbers = torch.tensor(1.0, dtype=torch.float64), iter(range(99))
    for function in (lambda t: rate.mul_(0.5), lambda t: 1 / (1 + next(numbers))):
        with pytest.raises(ConfigError, match=r"^learning_rate\(2\): expected the same number at each call, .* and then "):
            with_functions(linear(3, 3), linear(6, 6), learning_rate=function, stages=stages)


def test_a_table_of_later_rates_only_is_accepted() -> None:
    rates = {8: 0.1}
    with_functions(linear(3, 3), linear(6, 6), learning_rate=lambda t: rates[t])


# Tensors of other blocks


def passing(change: Callable[[Tensor], Tensor], method: Any, keep: Callable[[Tensor], Tensor] = lambda y: y) -> Pipeline:
    """Return a pipeline whose later block reads, after ``change``, what a function inside a coupling has computed and kept."""
    kept: dict[str, Tensor] = {}

    def inner(layer: nn.Module, x: Tensor) -> Tensor:
        y = torch.tanh(layer(x))
        kept["y"] = keep(y)
        return y

    def outer(layer: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        return y if x.is_meta else y * change(kept["y"]).repeat(1, 2)

    return with_functions(Function(inner, 3), Function(outer, 6), method=method)


@pytest.mark.parametrize("method", ["reversible", RECOMPUTE, "petra", "dsp", "backprop"])
def test_a_tensor_of_another_block_is_refused(method: Any) -> None:
    """Its gradient would be lost. Without delay, the second evaluation of the block would return the same output."""
    with pytest.raises(ModelError) as caught:
        passing(Tensor.clone, method).train(Vectors(), 8)
    delayed = "the same output for the same input again"
    expected = {"petra": delayed, "dsp": delayed}.get(str(method), "no tensors of other blocks")
    assert str(caught.value).startswith(f"block own: expected {expected}")


@pytest.mark.parametrize("change", [Tensor.detach, lambda y: y.new_ones(y.shape)])
@pytest.mark.parametrize("method", ["reversible", "backprop"])
def test_a_tensor_of_another_block_may_be_read_without_its_gradient(change: Callable[[Tensor], Tensor], method: str) -> None:
    pipeline = passing(Tensor.clone, method, change)
    plain = pipeline.plan.model.build(0)
    train_plainly(plain, sgd(plain), Vectors(), 4, k=2)
    pipeline.train(Vectors(), 4)
    torch.testing.assert_close(pipeline.state_dict(), dict(plain.state_dict()), rtol=0, atol=1e-12)


def test_constants_that_blocks_share_may_be_read() -> None:
    """A table of positions that the first block to need it makes."""
    table: list[Tensor] = []

    def shifted(layer: nn.Module, x: Tensor) -> Tensor:
        if not table and not x.is_meta:
            table.append(torch.arange(len(x)).to(x).cos())
        y: Tensor = layer(x)
        return y + table[0][:, None] if table else y

    pipeline = with_functions(Function(shifted, 3), Function(shifted, 6))
    plain = pipeline.plan.model.build(0)
    train_plainly(plain, sgd(plain), Vectors(), 4, k=2)
    pipeline.train(Vectors(), 4)
    torch.testing.assert_close(pipeline.state_dict(), dict(plain.state_dict()), rtol=0, atol=1e-12)


# Blocks


@pytest.mark.parametrize("method", ["reversible", RECOMPUTE, "petra", "backprop"])
@pytest.mark.parametrize("inside", [True, False])
def test_reentrant_checkpoints_are_refused_in_one_line(method: Any, inside: bool) -> None:
    own = Function(lambda layer, x: checkpoint(layer, x, use_reentrant=True), 3 if inside else 6)
    pipeline = with_functions(*((own, linear(6, 6)) if inside else (linear(3, 3), own)), method=method)
    with pytest.raises(ModelError) as caught:
        pipeline.train(Vectors(), 2)
    assert str(caught.value) == "torch.utils.checkpoint in a block: expected use_reentrant=False, got use_reentrant=True"


@pytest.mark.parametrize("method", ["reversible", RECOMPUTE, "1f1b"])
def test_a_block_that_differentiates_in_its_forward_pass_is_trained_as_in_plain_pytorch(method: Any) -> None:
    """As one that descends an energy."""

    def descended(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(layer(point).tanh().square().sum(), point, create_graph=True)
        return x - 0.1 * slope

    pipeline = with_functions(Function(descended, 3), Function(descended, 6), method=method)
    plain = pipeline.plan.model.build(0)
    train_plainly(plain, sgd(plain), Vectors(), 4, k=2)
    pipeline.train(Vectors(), 4)
    torch.testing.assert_close(pipeline.state_dict(), dict(plain.state_dict()), rtol=0, atol=1e-12)


class Copied(nn.Linear):
    """Makes its copies itself, with hooks of parameters or without, and does not tell others about them."""

    hooks = False

    def __deepcopy__(self, memo: Any) -> nn.Module:
        copied = Copied(self.in_features, self.out_features, dtype=self.weight.dtype)
        copied.load_state_dict(self.state_dict())
        if self.hooks:
            copied.weight.register_hook(lambda g: 3 * g)
        return copied


class Scaled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)  # type: ignore[no-any-return]


def hooked() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(6, 3))
    net.register_forward_hook(lambda module, x, y: 3 * y)
    return net


def replaced() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(6, 3))
    net.forward = lambda x: 3 * net[0](x)  # type: ignore[method-assign]
    return net


test_a_sequential_that_does_more_than_its_modules_is_refused = refuses(
    lambda net: Model.of("m", net),
    (Scaled(nn.Linear(6, 3)), "blocks of model m: expected an nn.Sequential without a forward or hooks of its own .*, got Scaled"),
    (replaced(), "an nn.Sequential without a forward or hooks of its own"),
    (hooked(), "an nn.Sequential without a forward or hooks of its own"),
    kind=ModelError,
)


def test_optimizers_see_the_attributes_of_parameters() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).double()
    for layer in net:
        layer.bias.without_decay = True  # type: ignore[assignment]
    seen = []

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        seen.extend([key for key, p in module.named_parameters() if getattr(p, "without_decay", False)])
        return sgd(module)

    make_pipeline(Model.of("mine", net), FLAT, optimizer=optimizer, method="backprop", stages=1)
    assert seen == ["0.bias", "1.bias"]


@pytest.mark.parametrize("hooks", [False, True])
def test_a_module_may_copy_itself(hooks: bool) -> None:
    """Its hooks act once."""
    own = Copied(6, 3, dtype=torch.float64)
    own.hooks = hooks
    own.weight.register_hook(lambda g: 3 * g)
    pipeline = make_pipeline(Model.of("mine", {"own": own}), FLAT, optimizer=sgd, method="backprop")
    train_plainly(own, sgd(own), Vectors(), 3)
    pipeline.train(Vectors(), 3)
    torch.testing.assert_close(pipeline.state_dict(), {f"own.{key}": t for key, t in own.state_dict().items()}, rtol=0, atol=1e-12)
