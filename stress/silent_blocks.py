"""Try unusual blocks, optimizers and hooks of users that could train other weights than plain autograd without an error.

``python -m stress.silent_blocks``

Each try trains a small reversible model, with the user's module as a block and inside a coupling, by the methods with exact
gradients. The weights and buffers must be those of plain autograd ("right"), or a method refuses in one line ("refused").
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from petra import BlockSpec, Hook, Keep, Method, Model, Pipeline, Recipe
from petra.errors import PetraError
from petra.reversible import Coupling
from stress.frame import run_tries
from stress.silent_library import C, D, Data, same, sgd, tries_of

AREAS = ("blocks", "optimizers", "hooks")
EXACT = ("backprop", "reversible", "1f1b", "gpipe", Method("recompute", 0, Keep.INPUT))
Build = Callable[[int], nn.Module]


class Halves(nn.Module):
    """Two streams from one, and one from two."""

    def forward(self, *x: Tensor) -> Any:
        return x[0].chunk(2, 1) if len(x) == 1 else torch.cat(x, 1)


class Own(nn.Module):
    """A linear layer and a function of the user, which takes the module and the input."""

    def __init__(self, function: Callable[[Any, Tensor], Any], width: int, **parts: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(width, width), function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def linear(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def model_of(own: Build) -> Model:
    builds: dict[str, Callable[[], nn.Module]] = {
        "first": partial(nn.Linear, D, D),
        "split": Halves,
        "c0": lambda: Coupling(own(D // 2)),
        "c1": lambda: Coupling(linear(D // 2)),
        "merge": Halves,
        "own": lambda: own(D),
        "head": partial(nn.Linear, D, C),
    }
    return Model("tried", tuple(BlockSpec(name, lambda build=build: build().double()) for name, build in builds.items()))


def plainly(
    model: nn.Module, optimizer: Any, start: int, stop: int, k: int = 2, after: Callable[[nn.Module], None] = lambda model: None
) -> None:
    for m in range(start, stop):
        F.cross_entropy(model(Data().inputs(m)), Data().targets(m)).backward()
        if (m + 1) % k == 0:
            for p in model.parameters():  # hooks inside blocks see the gradient of a microbatch's loss
                p.grad = None if p.grad is None else p.grad / k
            optimizer.step()
            optimizer.zero_grad()
            after(model)


def tried(
    own: Build = linear,
    optimizer: Callable[[nn.Module], Any] = sgd,
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    change: Callable[[Mapping[str, nn.Module]], None] = lambda blocks: None,
    after: Callable[[nn.Module], None] | None = None,
    tolerance: float = 1e-10,
) -> bool:
    """Train eight microbatches, and call ``change`` after four; ``after`` acts on the weights after each update."""
    model, refusals = model_of(own), list[PetraError]()
    with around():
        plain = model.build(0)
        made = optimizer(plain)
        plainly(plain, made, 0, 4, after=after or (lambda model: None))
        change(dict(plain.named_children()))
        plainly(plain, made, 4, 8, after=after or (lambda model: None))
    right = True
    for method in EXACT:
        try:
            with around():
                pipeline = Pipeline(model, Data.spec, Recipe(optimizer), method=method, k=2)
                if after is not None:
                    pipeline.hooks.append(After(pipeline, after))
                pipeline.train(Data(), 4)
                change(dict(pipeline.blocks()))
                pipeline.train(Data(), 4)
        except PetraError as error:
            refusals.append(error)
            continue
        if not same(pipeline, dict(plain.state_dict()), tolerance):
            print(f"  {method if isinstance(method, str) else method.name} differs")
            right = False
    if right and refusals:
        raise refusals[0]
    return right


class After(Hook):
    """Acts on the blocks of a stage after each update."""

    def __init__(self, pipeline: Pipeline, act: Callable[[nn.Module], None]) -> None:
        self._pipeline, self._act = pipeline, act

    def update_end(self, stage: int, m: int) -> None:
        for _, block in self._pipeline.blocks_of(stage):
            self._act(block)


class Sign(torch.autograd.Function):
    """Sign with the gradient of a clipped identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * (ctx.saved_tensors[0].abs() < 1)


def blocks_with_a_straight_through_gradient() -> bool:
    return tried(partial(Own, lambda own, x: Sign.apply(own.linear(x))))


def blocks_with_sparse_gradients() -> bool:
    def build(width: int) -> nn.Module:
        return Own(
            lambda own, x: own.table(x.detach().argmax(1)) + own.linear(x), width, table=nn.Embedding(width, width, sparse=True)
        )

    return tried(build, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))


def blocks_with_complex_parameters() -> bool:
    class Spectral(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.factor, n=x.shape[1])

    return tried(Spectral)


def blocks_that_choose_a_branch_by_their_input() -> bool:
    def choose(own: Any, x: Tensor) -> Tensor:
        branch = own.other if not x.is_meta and x.detach().sum() > 0 else own.linear
        return torch.tanh(branch(x))

    return tried(lambda width: Own(choose, width, other=nn.Linear(width, width)))


def blocks_frozen_after_building() -> bool:
    def freeze(blocks: Mapping[str, nn.Module]) -> None:
        blocks["own"].requires_grad_(False)

    return tried(change=freeze)


def blocks_that_descend_an_energy() -> bool:
    def descend(own: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(own.linear(point).tanh().square().sum(), point, create_graph=True)
        return x - 0.1 * slope

    return tried(partial(Own, descend))


def blocks_that_return_one_tensor_twice() -> bool:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * b.tanh()

    first = [nn.Linear(D, D).double(), Twice(), Product(), nn.Linear(D, C).double()]
    return tried_sequence({f"b{i}": block for i, block in enumerate(first)})


def tried_sequence(blocks: dict[str, nn.Module]) -> bool:
    """Compare a model of existing modules, which take the outputs of each other, with plain autograd."""
    model, right = Model.of("tried", blocks), True
    plain = model.build(0)
    plainly(plain, sgd(plain), 0, 6)
    for method in EXACT:
        pipeline = Pipeline(model, Data.spec, Recipe(sgd), method=method, k=2)
        pipeline.train(Data(), 6)
        right &= same(pipeline, dict(plain.state_dict()), 1e-10)
    return right


def blocks_whose_weights_another_layer_computes() -> bool:
    def generated(own: Any, x: Tensor) -> Tensor:
        weight = own.linear.weight @ own.other.weight
        y: Tensor = functional_call(own.linear, {"weight": weight}, (x,))
        return y.tanh()

    return tried(lambda width: Own(generated, width, other=nn.Linear(width, width)))


def blocks_that_are_pruned() -> bool:
    def build(width: int) -> nn.Module:
        layer = nn.Linear(width, width)
        prune.custom_from_mask(layer, "weight", torch.arange(width * width).reshape(width, width) % 3 > 0)
        return nn.Sequential(layer, nn.Tanh())

    return tried(build)


def blocks_with_layers_in_a_plain_list() -> bool:
    def build(width: int) -> nn.Module:
        hidden = [nn.Linear(width, width).double()]
        return Own(lambda own, x: own.linear(own.hidden[0](x).tanh()) if not x.is_meta else own.linear(x), width, hidden=hidden)

    return tried(build)


def blocks_with_cumulative_statistics() -> bool:
    return tried(lambda width: nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width, momentum=None), nn.Tanh()))


def blocks_that_use_statistics_twice() -> bool:
    def build(width: int) -> nn.Module:
        return Own(lambda own, x: own.norm(own.linear(own.norm(x))).tanh(), width, norm=nn.BatchNorm1d(width))

    return tried(build)


def blocks_that_write_entries_of_their_own_tensors() -> bool:
    def written(own: Any, x: Tensor) -> Tensor:
        y = own.linear(x)
        y[:, 0] *= 2
        y[:, 1:].tanh_()
        return y

    return tried(partial(Own, written))


def blocks_with_reentrant_checkpoints() -> bool:
    return tried(partial(Own, lambda own, x: checkpoint(lambda t: own.linear(t).tanh(), x, use_reentrant=True)))


def blocks_that_ask_whether_gradients_are_enabled() -> bool:
    def asked(own: Any, x: Tensor) -> Tensor:
        return own.linear(x).tanh() * (2 if torch.is_grad_enabled() else 1)

    return tried(partial(Own, asked))


def optimizers_with_slow_weights() -> bool:
    class Lookahead(torch.optim.SGD):
        calls = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.calls += 1
            for p in self.param_groups[0]["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.calls % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))

    return tried(optimizer=lambda module: Lookahead(module.parameters(), lr=0.1))


def optimizers_of_a_part_of_the_parameters() -> bool:
    def make(module: nn.Module) -> Any:
        chosen = [p for p in module.parameters() if p.dim() > 1]
        return torch.optim.SGD(chosen or [nn.Parameter(torch.zeros(1))], lr=0.1)

    return tried(optimizer=make)


def optimizers_that_normalise_weights_after_a_step() -> bool:
    def make(module: nn.Module) -> Any:
        made = sgd(module)

        @torch.no_grad()
        def normalise(optimizer: Any, arguments: Any, keywords: Any) -> None:
            for p in module.parameters():
                p.div_(p.norm().clamp(min=1))

        made.register_step_post_hook(normalise)
        return made

    return tried(optimizer=make)


def optimizers_whose_function_changes_weights() -> bool:
    def make(module: nn.Module) -> Any:
        for p in module.parameters():
            if p.dim() == 1:
                nn.init.constant_(p, 0.25)
        return sgd(module)

    return tried(optimizer=make)


def optimizers_that_assign_data() -> bool:
    class Assigning(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.data = p.data - 0.1 * p.grad

    return tried(optimizer=lambda module: Assigning(module.parameters(), lr=0.1))


def optimizers_whose_zero_grad_keeps_a_part() -> bool:
    class Feedback(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.detach_().mul_(0.5)

    return tried(optimizer=lambda module: Feedback(module.parameters(), lr=0.1))


def optimizers_that_lower_their_own_rate() -> bool:
    class Lowering(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                group["lr"] *= 0.7

    return tried(optimizer=lambda module: Lowering(module.parameters(), lr=0.1))


def hooks_of_tensors_inside_a_block() -> bool:
    def hooked(own: Any, x: Tensor) -> Tensor:
        y = own.linear(x)
        if y.requires_grad:
            y.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return y.tanh()

    return tried(partial(Own, hooked))


def hooks_of_inner_layers_that_scale_gradients() -> bool:
    def build(width: int) -> nn.Module:
        layer = nn.Linear(width, width)
        layer.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,) if inner[0] is not None else None)
        return nn.Sequential(nn.Tanh(), layer)

    return tried(build)


def hooks_of_all_modules() -> bool:
    @contextmanager
    def everywhere() -> Iterator[None]:
        scale = lambda module, x, y: y * 0.9 if isinstance(module, nn.Linear) else None  # noqa: E731
        handle = nn.modules.module.register_module_forward_hook(scale)
        try:
            yield
        finally:
            handle.remove()

    return tried(around=everywhere)


def hooks_that_round_saved_tensors() -> bool:
    def rounded(own: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (8 * t).round() / 8, lambda t: t):
            return own.linear(x).tanh()

    return tried(partial(Own, rounded))


def hooks_that_remove_themselves() -> bool:
    def build(width: int) -> nn.Module:
        layer = nn.Linear(width, width)

        def once(module: nn.Module, x: Any, y: Tensor) -> Tensor | None:
            if y.is_meta:
                return None
            handle.remove()
            return y * 3

        handle = layer.register_forward_hook(once)
        return nn.Sequential(layer, nn.Tanh())

    return tried(build)


def hooks_that_pass_features_past_the_blocks() -> bool:
    kept: dict[str, Tensor] = {}

    def build(width: int) -> nn.Module:
        if width == D:
            return Own(lambda own, x: own.linear(x) if x.is_meta else own.linear(x) * kept["y"].repeat(1, 2), width)
        layer = nn.Linear(width, width)
        layer.register_forward_hook(lambda module, x, y: kept.update(y=y))
        return nn.Sequential(layer, nn.Tanh())

    return tried(build)


def hooks_that_clamp_weights_after_an_update() -> bool:
    @torch.no_grad()
    def clamp(module: nn.Module) -> None:
        for p in module.parameters():
            p.clamp_(-0.2, 0.2)

    return tried(after=clamp)


def hooks_of_autocast_around_train() -> bool:
    return tried(around=lambda: torch.autocast("cpu", torch.bfloat16))


if __name__ == "__main__":
    run_tries(__doc__, tries_of(globals(), AREAS))
